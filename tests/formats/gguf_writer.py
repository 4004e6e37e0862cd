"""A small GGUF writer for tests, made from the format's description, not from the reader.

Lies on request: offsets and counts can be given instead of worked out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TYPE_IDS = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7,
    "str": 8, "array": 9, "u64": 10, "i64": 11, "f64": 12,
}  # fmt: skip
CODES = {
    "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?",
    "u64": "Q", "i64": "q", "f64": "d",
}  # fmt: skip
F32, F16, Q8_0, BF16 = 0, 1, 8, 30

Key = tuple[str, str, Any]
"""(key, type, value); an array's value is (item type, items)."""


@dataclass(frozen=True)
class Tensor:
    """ne: fastest axis first. offset: None = where it belongs."""

    name: str
    ne: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    """Length and bytes."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: str, value: Any) -> bytes:
    """A metadata value without its type number."""
    if kind == "str":
        return string(value)
    if kind == "array":
        item_kind, items = value
        head = struct.pack("<IQ", TYPE_IDS[item_kind], len(items))
        if item_kind in CODES:
            return head + struct.pack(f"<{len(items)}{CODES[item_kind]}", *items)
        return head + b"".join(value_bytes(item_kind, item) for item in items)
    return struct.pack("<" + CODES[kind], value)


def key_bytes(name: str | bytes, kind: str, value: Any) -> bytes:
    """A whole metadata entry."""
    return string(name) + struct.pack("<I", TYPE_IDS[kind]) + value_bytes(kind, value)


def header_bytes(n_tensors: int, n_keys: int, version: int = 3) -> bytes:
    """Magic, version and the two counts."""
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def gguf_bytes(
    keys: Sequence[Key] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file: every tensor's data padded to the alignment."""
    head = [header_bytes(len(tensors), len(keys), version)]
    head += [key_bytes(*key) for key in keys]
    data: list[bytes] = []
    data_bytes = 0
    for tensor in tensors:
        offset = data_bytes if tensor.offset is None else tensor.offset
        head.append(string(tensor.name) + struct.pack("<I", len(tensor.ne)))
        head.append(struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne))
        head.append(struct.pack("<IQ", tensor.type_id, offset))
        data.append(tensor.data + b"\0" * (-len(tensor.data) % alignment))
        data_bytes += len(data[-1])
    head_bytes = sum(map(len, head))
    return b"".join([*head, b"\0" * (-head_bytes % alignment), *data])


def f32_tensor(name: str, *shape: int, start: float = 0.0) -> Tensor:
    """A float tensor of ``shape`` (slowest axis first) counting up from ``start``."""
    count = 1
    for axis in shape:
        count *= axis
    data = struct.pack(f"<{count}f", *(start + i for i in range(count)))
    return Tensor(name, shape[::-1], F32, data)
