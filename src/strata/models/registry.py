"""The table of families, and which of them a checkpoint belongs to.

A new architecture is one file and one line here.
"""

from __future__ import annotations

import difflib

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import Checkpoint
from strata.models import (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    qwen2,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen4_exp,
)
from strata.models.family import Family

FAMILIES: tuple[Family, ...] = (
    qwen4_exp.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5_moe.FAMILY,
    gpt_oss.FAMILY,
    glm4_moe.FAMILY,
    deepseek_v3.FAMILY,
    llama.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
)

_VISION = ("clip", "siglip", "vision", "vit", "mmproj")


def find_family(ckpt: Checkpoint) -> Family:
    """The family of a checkpoint, by general.architecture or by config.json's names.

    UnsupportedError names what the file calls itself and lists what is supported; FormatError when
    it says nothing.
    """
    if ckpt.format == "gguf":
        return _by_name(ckpt, _gguf_name(ckpt), {n: f for f in FAMILIES for n in f.gguf_names})
    architecture, model_type = _hf_names(ckpt)
    by_architecture = {n: f for f in FAMILIES for n in f.architectures}
    by_type = {n: f for f in FAMILIES for n in f.model_types}
    if architecture is None:
        return _by_name(ckpt, model_type or "", by_type)
    return _by_name(ckpt, architecture, by_architecture)


def _gguf_name(ckpt: Checkpoint) -> str:
    name = ckpt.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError(
            f"{ckpt.paths[0]} has no general.architecture, so nothing says what model it is; "
            f"of a split set, keep all parts together"
        )
    return name


def _hf_names(ckpt: Checkpoint) -> tuple[str | None, str | None]:
    """(first architecture, model_type) of config.json; FormatError when it has neither."""
    if not ckpt.config:
        raise FormatError(
            f"{ckpt.root} has no config.json beside the weights, so nothing says what they are; "
            f"put it there"
        )
    names = ckpt.config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    model_type = ckpt.config.get("model_type")
    if not isinstance(architecture, str):
        architecture = None
    if not isinstance(model_type, str):
        model_type = None
    if architecture is None and model_type is None:
        raise FormatError(
            f"{ckpt.root}/config.json names neither architectures nor model_type; "
            f"use the one the model was published with"
        )
    return architecture, model_type


def _by_name(ckpt: Checkpoint, name: str, table: dict[str, Family]) -> Family:
    family = table.get(name)
    if family is not None:
        return family
    if any(part in name.lower() for part in _VISION):
        raise UnsupportedError(
            f"{ckpt.path}: {name!r} is a vision tower, not a language model; "
            f"give the language model's file"
        )
    near = difflib.get_close_matches(name, table, 1, 0.8)
    hint = f" (the nearest is {near[0]!r})" if near else ""
    raise UnsupportedError(
        f"{ckpt.path}: architecture {name!r} is not supported{hint}; supported are "
        f"{', '.join(sorted(table))}"
    )
