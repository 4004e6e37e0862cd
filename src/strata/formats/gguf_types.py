"""GGUF's numbers for metadata values and tensor types, as tables. Knows no files."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from strata.formats.weight_types import (
    BY_GGML_ID,
    RETIRED_GGML_IDS,
    UNSUPPORTED_GGML_IDS,
    WeightType,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class ScalarType:
    """A metadata value of fixed size: its name in listings and how one or many are unpacked."""

    name: str
    packed: struct.Struct
    dtype: str


SCALARS: dict[int, ScalarType] = {
    number: ScalarType(name, struct.Struct("<" + code), dtype)
    for number, name, code, dtype in (
        (0, "u8", "B", "<u1"),
        (1, "i8", "b", "<i1"),
        (2, "u16", "H", "<u2"),
        (3, "i16", "h", "<i2"),
        (4, "u32", "I", "<u4"),
        (5, "i32", "i", "<i4"),
        (6, "f32", "f", "<f4"),
        (BOOL, "bool", "B", "<u1"),
        (10, "u64", "Q", "<u8"),
        (11, "i64", "q", "<i8"),
        (12, "f64", "d", "<f8"),
    )
}


def tensor_type(ggml_id: int) -> WeightType:
    """The weight type of a ggml id; for one we cannot load, a stand-in of size 0.

    The stand-ins' names are "199 (unknown)", "4 (retired: Q4_2)" and "41 (unsupported: Q1_0)".
    """
    known = BY_GGML_ID.get(ggml_id)
    if known is not None:
        return known
    if ggml_id in RETIRED_GGML_IDS:
        reason = f"retired: {RETIRED_GGML_IDS[ggml_id]}"
    elif ggml_id in UNSUPPORTED_GGML_IDS:
        reason = f"unsupported: {UNSUPPORTED_GGML_IDS[ggml_id]}"
    else:
        reason = "unknown"
    return WeightType(f"{ggml_id} ({reason})", ggml_id, 1, 0, "quantized")
