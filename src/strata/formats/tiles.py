"""Tiles: quantized matrices re-coded exactly, rows interleaved by 16, one layout wherever they lie.

The codec in NumPy. Codes, scales and minima are those of the numerics contract (section 2), only
stored as docs/decisions/003-tiles.md says. Knows no files and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import FormatError
from strata.formats import tiles_scales
from strata.formats.quants import DECODERS, Codes, n_cols, values
from strata.formats.quants_simple import F32, HALF_E8M0, U8
from strata.formats.tile_formats import (
    SUPER_COLS,
    TILE_ROWS,
    TileFormat,
    TilePlan,
    require_format,
    tile_format,
    tile_plan,
)
from strata.formats.weight_types import TYPES

__all__ = [
    "TILE_ROWS",
    "Layout",
    "TileFormat",
    "TilePlan",
    "decode_tiles",
    "dequantize_tiles",
    "encode",
    "encode_into",
    "matrix_bytes",
    "tile_format",
    "tile_plan",
]

Layout = Literal["native", "tiles"]
"""How a matrix lies in memory: rows as the file has them, or tiles."""

_PIECE_WEIGHTS = 1 << 18


def matrix_bytes(type_name: str, layout: Layout, n_rows: int, n_cols: int) -> int:
    """Bytes of a matrix in that layout; n_cols must be whole blocks (ValueError, FormatError)."""
    if layout == "tiles":
        return tile_plan(type_name, n_rows, n_cols).n_bytes
    return n_rows * TYPES[type_name].row_bytes(n_cols)


def encode(type_name: str, raw: U8) -> U8:
    """Rows uint8 [N, row_bytes] as tiles, uint8 [n_bytes].

    UnsupportedError for a type without tiles, FormatError when row_bytes is not whole blocks.
    """
    require_format(type_name)
    plan = tile_plan(type_name, len(raw), n_cols(TYPES[type_name], raw))
    out = np.empty(plan.n_bytes, np.uint8)
    encode_into(type_name, raw, out)
    return out


def encode_into(type_name: str, raw: U8, out: U8) -> None:
    """``encode`` into given memory: out uint8 [n_bytes], contiguous; every byte is written."""
    form, weight_type = require_format(type_name), TYPES[type_name]
    plan = tile_plan(type_name, len(raw), n_cols(weight_type, raw))
    planes = _planes(form, plan, out)
    to_stored = stored_of(type_name)
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


def decode_tiles(
    type_name: str, blob: U8, n_rows: int, n_cols: int, rows: slice = slice(None)
) -> Codes:
    """Codes, scales and minima of rows of a matrix in tiles; equal to ``quants.decode`` of them.

    blob: uint8 [n_bytes], contiguous. rows: a range of rows, all by default. FormatError when the
    blob's size is not that of the shape.
    """
    form = require_format(type_name)
    planes = _planes(form, tile_plan(type_name, n_rows, n_cols), blob)
    wanted = range(n_rows)[rows]
    assert wanted.step == 1, "rows of tiles are read as a range"

    def rows_of(lanes: NDArray[Any]) -> NDArray[Any]:
        return _rows(lanes, wanted.start, wanted.stop)

    codes = form.code_table()[_unpack(rows_of(planes.codes), form.bits)]
    d = None if planes.supers is None else rows_of(planes.supers)
    scale, minimum = _scales(form, rows_of(planes.scales), d), None
    if planes.minimums is not None:
        d = None if planes.super_minimums is None else rows_of(planes.super_minimums)
        minimum = _scales(form, rows_of(planes.minimums), d)
    if form.scale == "F16":
        # the contract has one scale for each group, tiles one for each run of equal ones
        scale = np.repeat(scale, form.scale_blocks, axis=1)[:, : n_cols // form.group]
    return Codes(codes, scale, minimum)


def dequantize_tiles(
    type_name: str, blob: U8, n_rows: int, n_cols: int, rows: slice = slice(None)
) -> F32:
    """Rows of a matrix in tiles as f32 [rows, n_cols]; equal to ``quants.dequantize`` of them."""
    return values(decode_tiles(type_name, blob, n_rows, n_cols, rows))


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


def _rows(lanes: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Rows start .. stop - 1 out of [tile row, n, 16]: [rows, n]."""
    first, end = start // TILE_ROWS, -(-stop // TILE_ROWS)
    tiles = lanes[first:end].transpose(0, 2, 1)
    rows = tiles.reshape(tiles.shape[0] * TILE_ROWS, lanes.shape[1])
    return np.ascontiguousarray(rows[start - first * TILE_ROWS : stop - first * TILE_ROWS])


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


def _scales(form: TileFormat, field: NDArray[Any], d_bits: NDArray[np.uint16] | None) -> F32:
    """Stored scales (or minima) [rows, units] and the f16 above them as f32 [rows, units]."""
    if form.scale == "F16":
        return field.view(np.float16).astype(np.float32)
    if d_bits is None:
        table = HALF_E8M0 if form.scale == "E8M0" else tiles_scales.HALF_UE4M3_7
        return np.asarray(table[field], np.float32)
    small = (field.view(np.int8) if form.signed else field).astype(np.float32)
    with np.errstate(all="ignore"):
        d = d_bits.view(np.float16).astype(np.float32) * np.float32(form.factor)
        return np.asarray(np.repeat(d, SUPER_COLS // form.group, axis=1) * small, np.float32)


@cache
def stored_of(type_name: str) -> U8:
    """The smallest stored code u of every code c, indexed by c as an unsigned byte."""
    found = np.zeros(256, np.uint8)
    table = require_format(type_name).code_table()
    for u in range(len(table) - 1, -1, -1):
        found[table[u].view(np.uint8)] = u
    return found
