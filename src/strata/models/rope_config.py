"""From what a config.json or a GGUF says about rotary positions to a RotarySpec. Knows no family.

Sources: transformers' rope parameters (old and new spelling); the ``<arch>.rope.*`` keys of GGUF
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.models.config import MOST_TOKENS, Config
from strata.models.rotary import Pairing, from_factors, linear, llama3, plain, yarn
from strata.models.spec import RotarySpec

HF_TYPES = "default, linear, llama3 or yarn"
GGUF_TYPES = "none, linear or yarn"


@dataclass(frozen=True)
class Defaults:
    """What a family assumes where its config says nothing."""

    theta: float = 10000.0
    partial: float = 1.0


def hf_rope_section(config: Config) -> Config:
    """The rope settings: "rope_parameters", or "rope_scaling" in older files; may be empty."""
    section = config.section("rope_parameters")
    return section if section.values else config.section("rope_scaling")


def hf_rope_type(rope: Config) -> str:
    """The kind of scaling, "default" when none is named."""
    return rope.text("rope_type" if rope.has("rope_type") else "type", "default")


def hf_rotary(
    config: Config,
    head_dim: int,
    defaults: Defaults,
    pairing: Pairing = "half",
) -> RotarySpec:
    """Rotary of a config.json whose layers all use the same.

    UnsupportedError names an unknown rope type.

    head_dim: dims of the part of a head that the rotary factor refers to.
    """
    rope = hf_rope_section(config)
    nested = [k for k in rope.values if k in ("full_attention", "sliding_attention")]
    if nested:
        raise rope.unsupported(nested[0], rope.get(nested[0]), "one rope setting for all layers")
    theta = _either(rope, config, "rope_theta", defaults.theta)
    partial = _either(rope, config, "partial_rotary_factor", defaults.partial)
    if not 0 < partial <= 1:
        raise config.wrong("partial_rotary_factor", partial, "a number above 0 and at most 1")
    n_dims = int(head_dim * partial)
    kind = hf_rope_type(rope)
    if kind == "default":
        return plain(theta, n_dims, pairing)
    if kind == "linear":
        return linear(theta, n_dims, rope.positive("factor"), pairing)
    if kind == "llama3":
        return llama3(
            theta,
            n_dims,
            rope.positive("factor"),
            rope.positive("low_freq_factor"),
            rope.positive("high_freq_factor"),
            _original_context(config, rope),
            pairing,
        )
    if kind == "yarn":
        return _hf_yarn(config, rope, theta, n_dims, pairing)
    raise rope.unsupported("rope_type", kind, HF_TYPES)


def _either(rope: Config, config: Config, key: str, default: float) -> float:
    return rope.number(key) if rope.has(key) else config.number(key, default=default)


def _optional(section: Config, key: str) -> float | None:
    return section.number(key) if section.has(key) else None


def _original_context(config: Config, rope: Config) -> int:
    key = "original_max_position_embeddings"
    if config.has(key):
        return config.size(key, most=MOST_TOKENS)
    return (
        rope.size(key, most=MOST_TOKENS)
        if rope.has(key)
        else config.size("max_position_embeddings", most=MOST_TOKENS)
    )


def yarn_factor(config: Config, rope: Config) -> float:
    """How much YaRN stretches the context; the ratio of the two context lengths when not given."""
    if rope.has("factor"):
        return rope.positive("factor")
    return config.size("max_position_embeddings", most=MOST_TOKENS) / _original_context(
        config, rope
    )


def _hf_yarn(
    config: Config, rope: Config, theta: float, n_dims: int, pairing: Pairing
) -> RotarySpec:
    return yarn(
        theta,
        n_dims,
        yarn_factor(config, rope),
        _original_context(config, rope),
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        attention_factor=_optional(rope, "attention_factor"),
        truncate=rope.flag("truncate", True),
        pairing=pairing,
    )


def gguf_rotary(
    meta: Config,
    n_dims: int,
    pairing: Pairing = "half",
    *,
    truncate: bool = True,
    mscale: float | None = None,
    factors: Sequence[float] | None = None,
) -> RotarySpec:
    """Rotary of a GGUF.

    n_dims: rotated dims of a head; factors: rope_freqs.weight when the file has it.

    truncate: YaRN's rounding of the ramp, which a GGUF does not record; mscale: YaRN's mscale =
    mscale_all_dim.
    """
    theta = meta.number("rope.freq_base", default=10000.0)
    kind = meta.text("rope.scaling.type", "none")
    if kind == "none" and meta.has("rope.scale_linear"):
        kind = "linear"
    if factors is not None and kind == "none":
        return from_factors(theta, n_dims, factors, pairing)
    if factors is not None:
        raise meta.unsupported("rope.scaling.type", kind, "'none' beside a rope_freqs tensor")
    if kind == "none":
        return plain(theta, n_dims, pairing)
    if kind not in ("linear", "yarn"):
        raise meta.unsupported("rope.scaling.type", kind, GGUF_TYPES)
    factor = meta.positive("rope.scaling.factor", "rope.scale_linear")
    if kind == "linear":
        return linear(theta, n_dims, factor, pairing)
    meta.require("rope.scaling.yarn_ext_factor", 1.0)
    return yarn(
        theta,
        n_dims,
        factor,
        meta.size("rope.scaling.original_context_length", "context_length", most=MOST_TOKENS),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", default=1.0),
        mscale=mscale,
        mscale_all_dim=mscale,
        attention_factor=_optional(meta, "rope.scaling.yarn_attn_factor"),
        truncate=truncate,
        pairing=pairing,
    )
