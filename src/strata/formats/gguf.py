"""Reader of one GGUF file (versions 2 and 3): metadata and tensor table, over a read-only mapping.

Knows no split sets, no models and no decoders. Whatever the file claims is checked against the
bytes it has left before anything of that size is allocated or read, so a lying file costs no more
than its own bytes. Tensor types we cannot load are kept in the table (see
``gguf_types.tensor_type``); refusing them is the caller's decision.

Layout: u32 magic, u32 version, u64 tensors, u64 keys; per key: string name, u32 type, value; per
tensor: string name, u32 axes, u64 per axis (fastest first), u32 type, u64 offset; padding to the
alignment; data. A string is a u64 length and that many bytes; an array is u32 item type, u64 count
and the items.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.gguf_types import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING,
    VERSIONS,
    tensor_type,
)
from strata.formats.mapped import MappedFile
from strata.formats.string_array import StringArray, scan_strings
from strata.formats.tensor_info import TensorInfo, check_inside, shape_is_credible
from strata.formats.text import quoted

MetadataValue: TypeAlias = (
    "bool | int | float | str | NDArray[Any] | StringArray | list[MetadataValue]"
)
"""Numeric arrays are read-only numpy views, string arrays are lazy, arrays of arrays are lists."""

_MAX_AXES = 4
_MAX_NAME_BYTES = 65_535
_MAX_STRING_BYTES = 1 << 26
# Items that need one Python object each. The largest vocabularies have about 300,000 tokens.
_MAX_STRINGS = 1 << 24
_MAX_INNER_ARRAYS = 1 << 16
_MAX_ARRAY_DEPTH = 4
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufFile:
    """One open GGUF file.

    metadata_types: for each key what it is stored as ("u32", "str", "array of f32"), for listings.
    tensors: in the order of the file's table; offsets are absolute and their bytes are inside the
    file.
    """

    file: MappedFile
    version: int
    alignment: int
    metadata: Mapping[str, MetadataValue]
    metadata_types: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.file.path


def read_gguf(file: MappedFile) -> GgufFile:
    """Read header, metadata and tensor table of a mapped GGUF file.

    Raises FormatError (short, damaged, hostile) or UnsupportedError (version, byte order); both
    name the file.
    """
    cursor = _Cursor(file)
    version = _read_version(cursor)
    n_tensors, n_keys = cursor.u64("number of tensors"), cursor.u64("number of metadata keys")
    cursor.need_items(n_keys, _MIN_KEY_BYTES, "metadata keys")
    metadata, types = _read_metadata(cursor, n_keys)
    cursor.need_items(n_tensors, _MIN_TENSOR_BYTES, "tensors")
    alignment = _alignment(file.path, metadata)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    _check_data(file, tensors, alignment)
    return GgufFile(
        file, version, alignment, MappingProxyType(metadata), MappingProxyType(types), tensors
    )


class _Cursor:
    """Reads little-endian values forward; every read is checked against the bytes left."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.buffer = file.buffer
        self.end = file.size
        self.position = 0
        self.inner_arrays = 0

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: at byte {self.position}: {what}")

    def need(self, n_bytes: int, what: str) -> None:
        left = self.end - self.position
        if n_bytes > left:
            raise self.error(
                f"{what} needs {n_bytes} bytes but the file has {left} left; it is cut short or "
                "damaged, download it again"
            )

    def need_items(self, count: int, item_bytes: int, what: str) -> None:
        left = self.end - self.position
        if count * item_bytes > left:
            raise self.error(
                f"{count} {what} are declared, at least {count * item_bytes} bytes, but the file "
                f"has {left} left; it is cut short or damaged, download it again"
            )

    def unpack(self, packed: struct.Struct, what: str) -> Any:
        self.need(packed.size, what)
        (value,) = packed.unpack_from(self.buffer, self.position)
        self.position += packed.size
        return value

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.unpack(_U64, what))

    def string(self, what: str, limit: int) -> str:
        n_bytes = self.u64(f"length of {what}")
        self.need(n_bytes, what)
        if n_bytes > limit:
            raise self.error(f"{what} has {n_bytes} bytes; more than {limit} is not credible")
        raw = self.buffer[self.position : self.position + n_bytes]
        self.position += n_bytes
        return raw.decode("utf-8", "surrogateescape")


def _read_version(cursor: _Cursor) -> int:
    cursor.need(len(MAGIC), "magic number")
    magic = cursor.buffer[: len(MAGIC)]
    if magic != MAGIC:
        raise FormatError(
            f"{cursor.path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'"
        )
    cursor.position = len(MAGIC)
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if version != 0 and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{cursor.path} is a big-endian GGUF file; only little-endian files are supported"
        )
    raise UnsupportedError(
        f"{cursor.path} is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are "
        "supported"
    )


def _read_metadata(cursor: _Cursor, n_keys: int) -> tuple[dict[str, MetadataValue], dict[str, str]]:
    metadata: dict[str, MetadataValue] = {}
    types: dict[str, str] = {}
    places: dict[str, int] = {}
    for i in range(n_keys):
        place = cursor.position
        key = cursor.string(f"name of metadata key {i}", _MAX_NAME_BYTES)
        if key in places:
            raise FormatError(
                f"{cursor.path}: metadata key {quoted(key)} occurs twice, at bytes {places[key]} "
                f"and {place}; the file is damaged, download it again"
            )
        places[key] = place
        metadata[key], types[key] = _read_value(cursor, cursor.u32("value type"), key)
    return metadata, types


def _read_value(cursor: _Cursor, type_id: int, key: str) -> tuple[MetadataValue, str]:
    """A metadata value and the name of its type."""
    if type_id == STRING:
        return cursor.string(f"value of {quoted(key)}", _MAX_STRING_BYTES), "str"
    if type_id == ARRAY:
        return _read_array(cursor, key, depth=1)
    scalar = SCALARS.get(type_id)
    if scalar is None:
        raise cursor.error(f"metadata key {quoted(key)} has the unknown value type {type_id}")
    value = cursor.unpack(scalar.packed, f"value of {quoted(key)}")
    return (value != 0 if type_id == BOOL else value), scalar.name


def _read_array(cursor: _Cursor, key: str, depth: int) -> tuple[MetadataValue, str]:
    what = f"items of {quoted(key)}"
    item_type, count = cursor.u32(f"item type of {quoted(key)}"), cursor.u64(f"number of {what}")
    if item_type == STRING:
        return _read_strings(cursor, count, key), "array of str"
    if item_type == ARRAY:
        return _read_nested(cursor, count, key, depth), "array of arrays"
    scalar = SCALARS.get(item_type)
    if scalar is None:
        raise cursor.error(f"metadata key {quoted(key)} has the unknown item type {item_type}")
    cursor.need_items(count, scalar.packed.size, what)
    # numpy refuses an offset at the very end of a buffer, which is where an empty last array begins
    items: NDArray[Any] = (
        np.frombuffer(cursor.buffer, scalar.dtype, count, cursor.position)
        if count
        else np.empty(0, scalar.dtype)
    )
    cursor.position += count * scalar.packed.size
    if item_type == BOOL:
        items = items != 0
    items.flags.writeable = False
    return items, f"array of {scalar.name}"


def _read_strings(cursor: _Cursor, count: int, key: str) -> StringArray:
    cursor.need_items(count, 8, f"strings of {quoted(key)}")
    if count > _MAX_STRINGS:
        raise cursor.error(
            f"metadata key {quoted(key)} has {count} strings; more than {_MAX_STRINGS} is not "
            "credible"
        )
    positions = scan_strings(cursor.buffer, cursor.position, count, cursor.end)
    if positions is None:
        raise cursor.error(
            f"the {count} strings of {quoted(key)} run past the end of the file ({cursor.end} "
            "bytes); it is cut short or damaged, download it again"
        )
    cursor.position = positions[-1]
    return StringArray(memoryview(cursor.buffer), positions)


def _read_nested(cursor: _Cursor, count: int, key: str, depth: int) -> list[MetadataValue]:
    cursor.need_items(count, 12, f"arrays of {quoted(key)}")
    cursor.inner_arrays += count
    if depth >= _MAX_ARRAY_DEPTH or cursor.inner_arrays > _MAX_INNER_ARRAYS:
        raise cursor.error(
            f"metadata key {quoted(key)} nests arrays more than {_MAX_ARRAY_DEPTH} deep or more "
            f"than {_MAX_INNER_ARRAYS} in all, which is not credible"
        )
    return [_read_array(cursor, key, depth + 1)[0] for _ in range(count)]


def _alignment(path: Path, metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise FormatError(f"{path}: general.alignment is {value!r}; a power of two is required")
    return value


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    """The tensor table; offsets made absolute but not yet checked against the end of the file."""
    entries: dict[str, tuple[int, int, tuple[int, ...], int]] = {}
    for i in range(n_tensors):
        place = cursor.position
        name = cursor.string(f"name of tensor {i}", _MAX_NAME_BYTES)
        if name in entries:
            raise FormatError(
                f"{cursor.path}: tensor {quoted(name)} occurs twice, in the table at bytes "
                f"{entries[name][0]} and {place}; the file is damaged, download it again"
            )
        n_axes = cursor.u32("number of axes")
        if n_axes > _MAX_AXES:
            raise cursor.error(f"tensor {quoted(name)} has {n_axes} axes; {_MAX_AXES} at most")
        ne = tuple(cursor.u64(f"axis of {quoted(name)}") for _ in range(n_axes))
        type_id = cursor.u32(f"type of {quoted(name)}")
        offset = cursor.u64(f"offset of {quoted(name)}")
        if offset % alignment:
            raise cursor.error(
                f"tensor {quoted(name)} has offset {offset}, not a multiple of the alignment "
                f"{alignment}"
            )
        if not shape_is_credible(ne):
            raise cursor.error(f"tensor {quoted(name)} has axes {ne}, which is not credible")
        entries[name] = (place, type_id, ne[::-1], offset)
    data_start = -(-cursor.position // alignment) * alignment
    return tuple(
        _tensor(cursor.path, name, shape, type_id, data_start + offset)
        for name, (_, type_id, shape, offset) in entries.items()
    )


def _tensor(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
    kind = tensor_type(type_id)
    n_cols = shape[-1] if shape else 1
    if n_cols % kind.block_weights:
        raise FormatError(
            f"{path}: tensor {quoted(name)} is {kind.name} with rows of {n_cols}, not a multiple "
            f"of its block of {kind.block_weights}; the file is damaged"
        )
    n_bytes = kind.row_bytes(n_cols) * math.prod(shape[:-1])
    return TensorInfo(name, shape, kind, path, offset, n_bytes)


def _check_data(file: MappedFile, tensors: tuple[TensorInfo, ...], alignment: int) -> None:
    """Every tensor of known size lies inside the file, and no two share bytes."""
    placed = sorted((t for t in tensors if t.n_bytes), key=lambda t: (t.offset, t.n_bytes))
    check_inside(file.path, file.size, placed, alignment)
    for before, tensor in zip(placed, placed[1:], strict=False):
        if tensor.offset < before.offset + before.n_bytes:
            raise FormatError(
                f"{file.path}: tensors {quoted(before.name)} (bytes {before.offset} to "
                f"{before.offset + before.n_bytes}) and {quoted(tensor.name)} (from "
                f"{tensor.offset}) overlap; the file is damaged"
            )
