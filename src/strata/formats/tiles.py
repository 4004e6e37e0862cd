"""Tiles: quantized matrices re-coded exactly, rows interleaved by 16, one layout wherever they lie.

docs/decisions/003-tiles.md is the law; this module is its description in numbers and a NumPy codec.
Codes, scales and minima are those of the numerics contract (section 2), only stored otherwise.
Knows no files and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import FormatError, UnsupportedError
from strata.formats import tiles_scales
from strata.formats.quants import DECODERS, Codes, n_cols
from strata.formats.quants_simple import FP4_CODES, HALF_E8M0, IQ4_CODES, U8
from strata.formats.weight_types import TYPES

ScaleKind = Literal["F16", "SUPER", "E8M0", "UE4M3"]

TILE_ROWS = 16
PLANE_ALIGN = 128
SUPER_COLS = 256
_PIECE_WEIGHTS = 1 << 20


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
    form = _require(type_name)
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


def encode(type_name: str, raw: U8) -> U8:
    """Rows uint8 [N, row_bytes] as tiles, uint8 [n_bytes].

    UnsupportedError for a type without tiles, FormatError when row_bytes is not whole blocks.
    """
    _require(type_name)
    plan = tile_plan(type_name, len(raw), n_cols(TYPES[type_name], raw))
    out = np.empty(plan.n_bytes, np.uint8)
    encode_into(type_name, raw, out)
    return out


def encode_into(type_name: str, raw: U8, out: U8) -> None:
    """``encode`` into given memory: out uint8 [n_bytes], contiguous; every byte is written."""
    form, weight_type = _require(type_name), TYPES[type_name]
    plan = tile_plan(type_name, len(raw), n_cols(weight_type, raw))
    planes = _planes(form, plan, out)
    to_stored = _stored_of(type_name)
    out[:] = 0
    step = max(1, _PIECE_WEIGHTS // (TILE_ROWS * max(plan.n_cols, 1)))
    for first in range(0, plan.tile_rows, step):
        tiles = slice(first, first + step)
        rows = raw[first * TILE_ROWS : (first + step) * TILE_ROWS]
        blocks = np.ascontiguousarray(rows).reshape(-1, weight_type.block_bytes)
        with np.errstate(all="ignore"):  # scales are taken as bits, whatever they are
            codes = DECODERS[type_name](blocks)[0]
        stored = to_stored[codes.view(np.uint8).reshape(len(rows), plan.n_cols)]
        planes.codes[tiles] = _lanes(_pack(stored, form.bits))
        fields = tiles_scales.FIELDS[type_name](blocks)
        for plane, field in (
            (planes.scales, fields.scale),
            (planes.minimums, fields.minimum),
            (planes.supers, fields.super_scale),
            (planes.super_minimums, fields.super_minimum),
        ):
            if plane is not None and field is not None:
                plane[tiles] = _lanes(field.reshape(len(rows), -1))


def decode_tiles(type_name: str, blob: U8, n_rows: int, n_cols: int) -> Codes:
    """Codes, scales and minima of a matrix in tiles; equal to ``quants.decode`` of its rows.

    blob: uint8 [n_bytes], contiguous. FormatError when its size is not that of the shape.
    """
    form = _require(type_name)
    plan = tile_plan(type_name, n_rows, n_cols)
    planes = _planes(form, plan, blob)
    stored = _unpack(_rows(planes.codes, n_rows), form.bits)
    codes = form.code_table()[stored]
    scale = _scales(form, _rows(planes.scales, n_rows), planes.supers)
    minimum = None
    if planes.minimums is not None:
        minimum = _scales(form, _rows(planes.minimums, n_rows), planes.super_minimums)
    if form.scale == "F16":
        # the contract has one scale for each group, tiles one for each run of equal ones
        scale = np.repeat(scale, form.scale_blocks, axis=1)[:, : n_cols // form.group]
    return Codes(codes, scale, minimum)


@dataclass(frozen=True)
class _Planes:
    """Views of a blob: [tile row, unit, 16]."""

    codes: NDArray[np.uint32]
    scales: NDArray[Any]
    minimums: NDArray[Any] | None
    supers: NDArray[np.uint16] | None
    super_minimums: NDArray[np.uint16] | None


def _planes(form: TileFormat, plan: TilePlan, blob: U8) -> _Planes:
    if blob.dtype != np.uint8 or blob.shape != (plan.n_bytes,):
        raise FormatError(
            f"{blob.dtype} array of shape {list(blob.shape)} is not a {form.type} matrix "
            f"[{plan.n_rows}, {plan.n_cols}] in tiles, which takes uint8 [{plan.n_bytes}]"
        )

    def view(start: int, units: int, dtype: str, index: int = 0) -> NDArray[Any] | None:
        if start < 0:
            return None
        shape = (plan.tile_rows, units, TILE_ROWS)
        n_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
        start += index * n_bytes
        return blob[start : start + n_bytes].view(dtype).reshape(shape)

    units, n_supers = form.units(plan.n_cols), plan.n_cols // SUPER_COLS
    kind = "<u2" if form.scale == "F16" else "u1"
    codes = view(plan.codes, plan.n_blocks * form.block_words, "<u4")
    scales = view(plan.scales, units, kind)
    assert codes is not None and scales is not None
    return _Planes(
        codes,
        scales,
        view(plan.minimums, units, kind),
        view(plan.supers, n_supers, "<u2"),
        view(plan.supers, n_supers, "<u2", 1) if form.has_min else None,
    )


def _lanes(per_row: NDArray[Any]) -> NDArray[Any]:
    """[rows, n] -> [ceil(rows / 16), n, 16], missing rows zero."""
    missing = -len(per_row) % TILE_ROWS
    if missing:
        per_row = np.pad(per_row, ((0, missing), (0, 0)))
    return per_row.reshape(-1, TILE_ROWS, per_row.shape[1]).transpose(0, 2, 1)


def _rows(lanes: NDArray[Any], n_rows: int) -> NDArray[Any]:
    """The reverse of ``_lanes``."""
    units = lanes.shape[1]
    rows = lanes.transpose(0, 2, 1).reshape(len(lanes) * TILE_ROWS, units)
    return np.ascontiguousarray(rows[:n_rows])


def _pack(stored: U8, bits: int) -> NDArray[np.uint32]:
    """Stored codes [rows, K] as words [rows, K / 32 * bits]; a byte's fields are 4 k apart."""
    n_words = stored.shape[1] // 32 * bits
    words = np.ascontiguousarray(stored).view("<u4").reshape(len(stored), n_words, 8 // bits)
    packed: NDArray[np.uint32] = words[:, :, 0].copy()
    for field in range(1, 8 // bits):
        packed |= words[:, :, field] << np.uint32(bits * field)
    return packed


def _unpack(packed: NDArray[np.uint32], bits: int) -> U8:
    """The reverse of ``_pack``: uint8 [rows, K]."""
    field_mask = np.uint32((2**bits - 1) * 0x01010101)
    shifts = np.arange(0, 8, bits, dtype=np.uint32)
    words = packed[:, :, None] >> shifts & field_mask
    n_cols = packed.shape[1] * 32 // bits
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(packed), n_cols)


def _scales(
    form: TileFormat, field: NDArray[Any], supers: NDArray[np.uint16] | None
) -> NDArray[np.float32]:
    """Stored scales (or minima) [rows, units] as f32 [rows, units]."""
    if form.scale == "F16":
        return field.view(np.float16).astype(np.float32)
    if form.scale != "SUPER":
        table = HALF_E8M0 if form.scale == "E8M0" else tiles_scales.HALF_UE4M3_7
        return np.asarray(table[field], np.float32)
    assert supers is not None
    with np.errstate(all="ignore"):
        d = _rows(supers, len(field)).view(np.float16).astype(np.float32)
        d *= np.float32(form.factor)
        small = (field.view(np.int8) if form.signed else field).astype(np.float32)
        return np.repeat(d, SUPER_COLS // form.group, axis=1) * small


@cache
def _stored_of(type_name: str) -> U8:
    """The smallest stored code u of every code c, indexed by c as an unsigned byte."""
    found = np.zeros(256, np.uint8)
    table = _FORMATS[type_name].code_table()
    for u in range(len(table) - 1, -1, -1):
        found[table[u].view(np.uint8)] = u
    return found


def _require(type_name: str) -> TileFormat:
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
