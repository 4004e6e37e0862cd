"""What tiles look like: each weight type's code width, code values and scales; plane offsets.

docs/decisions/003-tiles.md is the law; this is the same in numbers. Knows no data and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.quants_simple import FP4_CODES, IQ4_CODES
from strata.formats.weight_types import TYPES

ScaleKind = Literal["F16", "SUPER", "E8M0", "UE4M3"]

TILE_ROWS = 16
PLANE_ALIGN = 128
SUPER_COLS = 256


@dataclass(frozen=True)
class TileFormat:
    """How one weight type lies in tiles.

    type: its name. bits: of a stored code u, 2, 4 or 8. The code is ``c = mul * u - bias``, or
    ``table[u]`` (16 signed bytes) where there is a table. scale: form of the scales, one for
    ``scale_blocks`` blocks of 32 columns (F16) or for ``group`` columns (the others). signed:
    SUPER's bytes are signed. factor: SUPER's power of two. has_min: there is a plane of minima.
    """

    type: str
    bits: int
    mul: int
    bias: int
    table: tuple[int, ...] | None
    scale: ScaleKind
    scale_blocks: int
    group: int
    signed: bool
    factor: float
    has_min: bool

    @property
    def block_words(self) -> int:
        """32-bit words of one row's 32 codes: 2, 4 or 8."""
        return self.bits

    def units(self, n_cols: int) -> int:
        """Scales of one row of n_cols columns."""
        if self.scale == "F16":
            return -(-n_cols // (32 * self.scale_blocks))
        return n_cols // self.group

    def code_table(self) -> NDArray[np.int8]:
        """The code c of every stored u, int8 [2^bits]."""
        if self.table is not None:
            return np.array(self.table, np.int8)
        return (self.mul * np.arange(2**self.bits) - self.bias).astype(np.int8)


@dataclass(frozen=True)
class TilePlan:
    """Where the planes of a matrix [n_rows, n_cols] begin, bytes from its start; -1 = none.

    tile_rows: ceil(n_rows / 16). n_blocks: n_cols / 32. n_bytes: of the whole, a multiple of 128.
    """

    n_rows: int
    n_cols: int
    tile_rows: int
    n_blocks: int
    codes: int
    scales: int
    minimums: int
    supers: int
    n_bytes: int


def tile_format(type_name: str) -> TileFormat | None:
    """The tiles of a weight type; None for types that stay as stored (floats, integers)."""
    return _FORMATS.get(type_name)


def tile_plan(type_name: str, n_rows: int, n_cols: int) -> TilePlan:
    """Offsets and size of a matrix of that type as tiles.

    UnsupportedError for a type without tiles, FormatError when n_cols is not whole blocks of it.
    """
    form = require_format(type_name)
    block = TYPES[type_name].block_weights
    if n_cols % block:
        raise FormatError(
            f"{n_cols} columns are not whole blocks of {block} as {type_name} needs; "
            f"the file's shapes contradict its types"
        )
    tile_rows, n_blocks = -(-n_rows // TILE_ROWS), n_cols // 32
    lanes = tile_rows * TILE_ROWS
    end = 0

    def place(n_bytes: int, wanted: bool = True) -> int:
        nonlocal end
        if not wanted:
            return -1
        start = end
        end = -(-(start + n_bytes) // PLANE_ALIGN) * PLANE_ALIGN
        return start

    width = 2 if form.scale == "F16" else 1
    codes = place(4 * form.block_words * n_blocks * lanes)
    scales = place(width * form.units(n_cols) * lanes)
    minimums = place(width * form.units(n_cols) * lanes, form.has_min)
    n_supers = 2 if form.has_min else 1
    supers = place(2 * n_supers * (n_cols // SUPER_COLS) * lanes, form.scale == "SUPER")
    return TilePlan(n_rows, n_cols, tile_rows, n_blocks, codes, scales, minimums, supers, end)


def require_format(type_name: str) -> TileFormat:
    """``tile_format``, but UnsupportedError for a type without tiles."""
    form = _FORMATS.get(type_name)
    if form is None:
        raise UnsupportedError(f"{type_name} has no tiles; such matrices stay as they are stored")
    return form


def _mirrored(*levels: int) -> tuple[int, ...]:
    """A table of the levels and their negatives, ascending, zeros after them: 16 values."""
    both = (*(-x for x in reversed(levels)), *levels)
    return both + (0,) * (16 - len(both))


_IQ1 = _mirrored(1, 7, 9)
_IQ2 = _mirrored(8, 25, 43)
_IQ3_XXS = _mirrored(4, 12, 20, 28, 36, 44, 52, 62)
_IQ4 = tuple(IQ4_CODES.tolist())
_FP4 = tuple(FP4_CODES.tolist())


def _f16(name: str, bits: int, bias: int, blocks: int = 1) -> TileFormat:
    has_min = TYPES[name].has_min
    return TileFormat(name, bits, 1, bias, None, "F16", blocks, 32, False, 1.0, has_min)


def _super(
    name: str,
    bits: int,
    code: tuple[int, int] | tuple[int, ...],
    signed: bool = False,
    factor: float = 1.0,
) -> TileFormat:
    """code: (mul, bias), or a table of 16."""
    t = TYPES[name]
    mul, bias, table = (0, 0, code) if len(code) == 16 else (code[0], code[1], None)
    return TileFormat(name, bits, mul, bias, table, "SUPER", 0, t.group, signed, factor, t.has_min)


def _table(name: str, table: tuple[int, ...], scale: ScaleKind, blocks: int) -> TileFormat:
    group = TYPES[name].group
    return TileFormat(name, 4, 0, 0, table, scale, blocks, group, False, 1.0, False)


_FORMATS: dict[str, TileFormat] = {
    form.type: form
    for form in (
        _f16("Q8_0", 8, 128),
        _f16("Q5_0", 8, 128),
        _f16("Q5_1", 8, 128),
        _f16("Q4_0", 4, 8),
        _f16("Q4_1", 4, 0),
        _f16("Q2_0", 2, 1, blocks=2),
        _f16("TQ1_0", 2, 1, blocks=8),
        _f16("TQ2_0", 2, 1, blocks=8),
        _super("Q2_K", 2, (1, 0)),
        _super("Q3_K", 4, (1, 4), signed=True),
        _super("Q4_K", 4, (1, 0)),
        _super("Q5_K", 8, (1, 128)),
        _super("Q6_K", 8, (1, 128), signed=True),
        _super("IQ1_S", 4, _IQ1, factor=0.125),
        _super("IQ1_M", 4, _IQ1, factor=0.125),
        _super("IQ2_XXS", 4, _IQ2, factor=0.125),
        _super("IQ2_XS", 4, _IQ2, factor=0.125),
        _super("IQ2_S", 4, _IQ2, factor=0.125),
        _super("IQ3_XXS", 4, _IQ3_XXS, factor=0.25),
        _super("IQ3_S", 4, (2, 15)),
        _super("IQ4_XS", 4, _IQ4, signed=True),
        _table("IQ4_NL", _IQ4, "F16", 1),
        _table("MXFP4", _FP4, "E8M0", 0),
        _table("NVFP4", _FP4, "UE4M3", 0),
    )
}
