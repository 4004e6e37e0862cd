"""Every way a tensor's numbers can be stored that we know of, as one table.

Knows no files and no decoders.

Ids and block sizes are those of ggml (checked against libggml in the tests); safetensors-only types
have no ggml id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["float", "quantized", "integer"]


@dataclass(frozen=True)
class WeightType:
    """A storage type: ``block_weights`` consecutive numbers of a row take ``block_bytes`` bytes.

    group: weights per scale (and minimum) in the numerics contract, section 2; 0 for floats and
    integers.
    has_min: the contract's decode has a minimum ``m_w``.
    """

    name: str
    ggml_id: int | None
    block_weights: int
    block_bytes: int
    kind: WeightKind
    group: int = 0
    has_min: bool = False

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of n_cols numbers; n_cols must be whole blocks (ValueError)."""
        if n_cols % self.block_weights:
            raise ValueError(
                f"{n_cols} columns are not a multiple of {self.name}'s block of "
                f"{self.block_weights}"
            )
        return n_cols // self.block_weights * self.block_bytes


def _q(name: str, gid: int | None, n: int, size: int, group: int, m: bool = False) -> WeightType:
    return WeightType(name, gid, n, size, "quantized", group, m)


_ALL = (
    WeightType("F32", 0, 1, 4, "float"),
    WeightType("F16", 1, 1, 2, "float"),
    WeightType("BF16", 30, 1, 2, "float"),
    WeightType("F64", 28, 1, 8, "float"),
    WeightType("F8_E4M3", None, 1, 1, "float"),
    WeightType("F8_E5M2", None, 1, 1, "float"),
    # a row of e4m3 bytes in blocks of 128, each followed by its f32 scale: made on load from
    # block-FP8 files
    WeightType("F8_E4M3_B128", None, 128, 132, "float"),
    WeightType("I8", 24, 1, 1, "integer"),
    WeightType("I16", 25, 1, 2, "integer"),
    WeightType("I32", 26, 1, 4, "integer"),
    WeightType("I64", 27, 1, 8, "integer"),
    WeightType("U8", None, 1, 1, "integer"),
    WeightType("BOOL", None, 1, 1, "integer"),
    _q("Q4_0", 2, 32, 18, 32),
    _q("Q4_1", 3, 32, 20, 32, True),
    _q("Q5_0", 6, 32, 22, 32),
    _q("Q5_1", 7, 32, 24, 32, True),
    _q("Q8_0", 8, 32, 34, 32),
    _q("Q2_K", 10, 256, 84, 16, True),
    _q("Q3_K", 11, 256, 110, 16),
    _q("Q4_K", 12, 256, 144, 32, True),
    _q("Q5_K", 13, 256, 176, 32, True),
    _q("Q6_K", 14, 256, 210, 16),
    _q("IQ2_XXS", 16, 256, 66, 32),
    _q("IQ2_XS", 17, 256, 74, 16),
    _q("IQ3_XXS", 18, 256, 98, 32),
    _q("IQ1_S", 19, 256, 50, 32),
    _q("IQ4_NL", 20, 32, 18, 32),
    _q("IQ3_S", 21, 256, 110, 32),
    _q("IQ2_S", 22, 256, 82, 16),
    _q("IQ4_XS", 23, 256, 136, 32),
    _q("IQ1_M", 29, 256, 56, 16),
    _q("TQ1_0", 34, 256, 54, 32),
    _q("TQ2_0", 35, 256, 66, 32),
    _q("MXFP4", 39, 32, 17, 32),
    _q("NVFP4", 40, 64, 36, 16),
    _q("Q2_0", 42, 64, 18, 32),
)

TYPES: dict[str, WeightType] = {t.name: t for t in _ALL}
BY_GGML_ID: dict[int, WeightType] = {t.ggml_id: t for t in _ALL if t.ggml_id is not None}

RETIRED_GGML_IDS: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Numbers that ggml once gave to types it no longer reads."""

UNSUPPORTED_GGML_IDS: dict[int, str] = {9: "Q8_1", 15: "Q8_K", 41: "Q1_0"}
"""Known types that are not weights (activations only) or have no kernel here."""
