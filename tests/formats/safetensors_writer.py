"""A small safetensors writer for tests, made from the format's description; it can lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Entry:
    """One tensor: dtype name, shape and data."""

    dtype: str
    shape: Sequence[int]
    data: bytes


def f32(*shape: int, start: float = 0.0) -> Entry:
    """Floats counting up from ``start``."""
    values = start + np.arange(int(np.prod(shape)), dtype=np.float32)
    return Entry("F32", shape, values.tobytes())


def header_for(tensors: Mapping[str, Entry]) -> dict[str, Any]:
    """The header's JSON object, data in the order given."""
    header: dict[str, Any] = {}
    offset = 0
    for name, entry in tensors.items():
        end = offset + len(entry.data)
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return header


def packed(header: str | bytes | Mapping[str, Any], data: bytes = b"") -> bytes:
    """A file of this header (text as given, or an object) and data."""
    if isinstance(header, Mapping):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + data


def safetensors_bytes(tensors: Mapping[str, Entry]) -> bytes:
    """A whole honest file."""
    return packed(header_for(tensors), b"".join(entry.data for entry in tensors.values()))


def write_indexed(folder: Path, parts: Mapping[str, Mapping[str, Entry]]) -> Path:
    """Files and their index; gives the index's path."""
    weight_map = {}
    for file_name, tensors in parts.items():
        (folder / file_name).write_bytes(safetensors_bytes(tensors))
        weight_map |= dict.fromkeys(tensors, file_name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index
