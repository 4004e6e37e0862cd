"""Checkpoints changed on purpose: copies with other settings, other names or other tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from strata.formats.checkpoint import open_checkpoint
from tests.formats.gguf_writer import Key, Tensor, gguf_bytes

Tensors = dict[str, torch.Tensor]


def edit_folder(
    source: Path,
    target: Path,
    tensors: Callable[[Tensors], Tensors] | None = None,
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Path:
    """A copy of a safetensors folder after both functions."""
    target.mkdir(parents=True, exist_ok=True)
    stored = load_file(str(source / "model.safetensors"))
    settings = json.loads((source / "config.json").read_text())
    changed = tensors(stored) if tensors is not None else stored
    settings = config(settings) if config is not None else settings
    save_file({k: v.contiguous() for k, v in changed.items()}, str(target / "model.safetensors"))
    (target / "config.json").write_text(json.dumps(settings))
    return target


def edit_gguf(
    source: Path,
    target: Path,
    keys: Mapping[str, tuple[str, Any] | None] | None = None,
    rename: Callable[[str], str | None] | None = None,
    extra: tuple[Tensor, ...] = (),
) -> Path:
    """A copy of a GGUF with keys replaced and tensors renamed (None: dropped) or added."""
    with open_checkpoint(source, for_inspection=True) as ckpt:
        written: dict[str, Key] = {}
        for name, value in ckpt.metadata.items():
            written[name] = _key(name, ckpt.metadata_types[name], value)
        for name, change in (keys or {}).items():
            written.pop(name, None)
            if change is not None:
                written[name] = (name, *change)
        tensors = []
        for name, info in ckpt.tensors.items():
            new = rename(name) if rename is not None else name
            if new is not None:
                type_id = info.type.ggml_id
                assert type_id is not None
                tensors.append(Tensor(new, info.shape[::-1], type_id, ckpt.raw(name).tobytes()))
        target.write_bytes(gguf_bytes(list(written.values()), [*tensors, *extra]))
    return target


def _key(name: str, kind: str, value: Any) -> Key:
    if not kind.startswith("array of "):
        return name, kind, value
    items = value.tolist() if isinstance(value, np.ndarray) else list(value)
    return name, "array", (kind.removeprefix("array of "), items)
