"""Reader of one safetensors file over a read-only mapping; its header is checked first.

Knows no sets of files and no models. The ``safetensors`` package opens the file once after our own
check, as a second opinion (``confirm``); the bytes are read through our mapping.

Layout: u64 header length, a JSON object {name: {dtype, shape, data_offsets [begin, end)},
"__metadata__": {...}}, then the data; offsets count from the end of the header.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from strata.core.errors import FormatError
from strata.formats.json_file import parse_json_object
from strata.formats.mapped import MappedFile
from strata.formats.tensor_info import TensorInfo, check_inside, shape_is_credible
from strata.formats.text import listed, quoted
from strata.formats.weight_types import TYPES, WeightType

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_MAX_AXES = 32

_OTHER_DTYPES: dict[str, tuple[int, int]] = {
    "U16": (1, 2),
    "U32": (1, 4),
    "U64": (1, 8),
    "C64": (1, 8),
    "F8_E8M0": (1, 1),
    "F4": (2, 1),
    "F6_E2M3": (4, 3),
    "F6_E3M2": (4, 3),
}
"""Dtypes of the format that we can list but not load: numbers and bytes of a block."""


@dataclass(frozen=True)
class SafetensorsFile:
    """One open file; tensors in the order of their data, metadata is the header's free text."""

    file: MappedFile
    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]


def read_safetensors(file: MappedFile) -> SafetensorsFile:
    """Read and check the header of a mapped file; FormatError names the file and the fault."""
    header, data_start = _read_header(file)
    metadata = _free_text(file.path, header.pop(_METADATA, {}))
    tensors = [_tensor(file.path, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.n_bytes))
    _check_data(file, tensors, data_start)
    return SafetensorsFile(file, tuple(tensors), metadata)


def confirm(opened: SafetensorsFile) -> None:
    """Let the ``safetensors`` package open it too; FormatError when it sees something else."""
    path = opened.file.path
    try:
        with safe_open(str(path), framework="numpy") as other:
            names = set(other.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{path}: the safetensors package refuses it: {error}") from None
    ours = {tensor.name for tensor in opened.tensors}
    if names != ours:
        differing = listed(sorted(quoted(name) for name in names ^ ours))
        raise FormatError(f"{path}: the safetensors package lists other tensors: {differing}")


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < _LENGTH.size:
        raise FormatError(
            f"{file.path} has {file.size} bytes, too few for a safetensors header; download it "
            "again"
        )
    (n_bytes,) = _LENGTH.unpack_from(file.buffer, 0)
    data_start = _LENGTH.size + n_bytes
    if n_bytes > _MAX_HEADER_BYTES:
        raise FormatError(
            f"{file.path} is not a safetensors file: it declares a header of {n_bytes} bytes (the "
            f"format allows {_MAX_HEADER_BYTES})"
        )
    if data_start > file.size:
        raise FormatError(
            f"{file.path} is cut short: its header needs {n_bytes} bytes, {data_start - file.size} "
            "of them are missing; download it again"
        )
    raw = file.buffer[_LENGTH.size : data_start]
    if not raw.startswith(b"{"):
        raise FormatError(
            f"{file.path} is not a safetensors file: its header begins with {raw[:8]!r}, not '{{'"
        )
    return parse_json_object(raw, f"the header of {file.path}", unique=True), data_start


def _free_text(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(f"{path}: {_METADATA} in the header must map names to texts")
    return value


def _dtype(name: str) -> WeightType | None:
    """The weight type of a dtype, or a stand-in for one we can only list; None when unknown."""
    known = TYPES.get(name)
    if known is not None and known.kind != "quantized" and known.block_weights == 1:
        return known
    other = _OTHER_DTYPES.get(name)
    return None if other is None else WeightType(f"{name} (unsupported)", None, *other, "quantized")


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(
            f"{where} needs dtype, shape and data_offsets in the header; it is damaged"
        )
    shape, offsets = _naturals(entry["shape"]), _naturals(entry["data_offsets"])
    if shape is None or len(shape) > _MAX_AXES or not shape_is_credible(shape):
        raise FormatError(f"{where} has the impossible shape {str(entry['shape'])[:80]}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(
            f"{where} has the impossible data offsets {str(entry['data_offsets'])[:80]}"
        )
    dtype, begin, end = str(entry["dtype"]), *offsets
    kind = _dtype(dtype)
    if kind is None:
        # a type nobody knows: believe the stated size, so that a listing can show it
        kind = WeightType(f"{dtype[:40]} (unknown)", None, 1, 0, "quantized")
        return TensorInfo(name, shape, kind, path, data_start + begin, end - begin)
    n_elements = math.prod(shape)
    if n_elements % kind.block_weights or end - begin != kind.row_bytes(n_elements):
        raise FormatError(
            f"{where} is {dtype} of shape {list(shape)} but occupies {end - begin} bytes; the "
            "header contradicts itself, download it again"
        )
    return TensorInfo(name, shape, kind, path, data_start + begin, end - begin)


def _naturals(value: Any) -> tuple[int, ...] | None:
    """``value`` as a tuple of integers >= 0, or None when it is something else."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _check_data(file: MappedFile, tensors: list[TensorInfo], data_start: int) -> None:
    """The data section is exactly the tensors, one after another (``tensors`` sorted by offset)."""
    check_inside(file.path, file.size, tensors)
    end, before = data_start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise FormatError(
                f"{file.path}: the data of tensor {quoted(tensor.name)} (from byte "
                f"{tensor.offset}) {fault} {before} (to byte {end}); the header is damaged, "
                "download it again"
            )
        end, before = tensor.offset + tensor.n_bytes, quoted(tensor.name)
    if end != file.size:
        raise FormatError(
            f"{file.path} has {file.size - end} bytes after its last tensor that belong to "
            "nothing; the file is damaged, download it again"
        )
