# mypy: allow-untyped-defs, allow-untyped-decorators
"""A rectangle of a weight matrix as f32 numbers inside Triton programs.

Knows no grids and no products. For kernels that multiply by f32 activations or by tensor cores, so
outside the order of the numerics contract; ``tile_product`` and ``float_product`` are inside it.
w = c * s_w - m_w with two roundings at most, as in the file's own dequantization.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.tile_product import (
    code_table,
    look_up,
    plane_at,
    scale_values,
    stored_scales,
    super_scales,
)


@triton.jit
def _fields(words, COUNT: tl.constexpr, BITS: tl.constexpr, MASK: tl.constexpr):
    """[R, W] words -> [R, W, COUNT]: the words shifted by 0, BITS, 2 BITS ... and masked."""
    shift = tl.arange(0, COUNT)[None, None, :] * BITS
    return (words[:, :, None] >> shift) & MASK


@triton.jit
def _bytes(words, ROWS: tl.constexpr, N: tl.constexpr):
    """[ROWS, N / 4] or [ROWS, N / 4 / F, F] words -> int32 [ROWS, N]: their signed bytes."""
    flat = tl.reshape(words, (ROWS, N // 4))
    shift = 24 - tl.arange(0, 4)[None, None, :] * 8
    return tl.reshape((flat[:, :, None] << shift) >> 24, (ROWS, N))


@triton.jit
def _codes(M: tl.constexpr, words, ROWS: tl.constexpr, N: tl.constexpr):
    """int32 [ROWS, N] codes c from the words of N columns [ROWS, N * bits / 32]."""
    BITS: tl.constexpr = M.bits
    if BITS == 8:
        c = _bytes(words ^ -2139062144, ROWS, N)  # 0x80808080
    elif len(M.table) > 0:
        low, high = look_up(code_table(M), words, M.lifted)
        c = _bytes(tl.join(low, high), ROWS, N)
    elif BITS == 4:
        c = _bytes(_fields(words, 2, 4, 0x0F0F0F0F), ROWS, N)
    else:
        c = _bytes(_fields(words, 4, 2, 0x03030303), ROWS, N)
    if BITS < 8 and (len(M.table) == 0 or M.lifted):
        c = c * M.mul - M.bias
    return c


@triton.jit
def _spread(values, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """One tensor [ROWS, BLOCKS] for each group of a block -> f32 [ROWS, 32 BLOCKS]."""
    GROUPS: tl.constexpr = len(values)
    if GROUPS == 2:
        flat = tl.reshape(tl.join(values[0], values[1]), (ROWS, BLOCKS * 2))
    else:
        flat = values[0]
    COUNT: tl.constexpr = BLOCKS * GROUPS
    WIDTH: tl.constexpr = 32 // GROUPS
    wide = tl.broadcast_to(flat[:, :, None], (ROWS, COUNT, WIDTH))
    return tl.reshape(wide, (ROWS, BLOCKS * 32))


@triton.jit
def tile_values(M: tl.constexpr, base, row, first_block, BLOCKS: tl.constexpr):
    """f32 [ROWS, 32 BLOCKS]: rows ``row`` [ROWS] of a matrix in tiles, blocks first_block and up.

    base: int64 address, a multiple of 16. Rows and blocks beyond the matrix are 0. BLOCKS: a power
    of two.
    """
    ROWS: tl.constexpr = row.shape[0]
    NB: tl.constexpr = M.n_cols // 32
    BITS: tl.constexpr = M.bits
    tr = row[:, None] // 16
    rr = row[:, None] % 16
    ok_row = row[:, None] < M.n_rows
    word = tl.arange(0, BLOCKS * BITS)[None, :]
    at = first_block + word // BITS
    index = ((tr * NB + at) * BITS + word % BITS) * 16 + rr
    ok = ok_row & (at < NB)
    words = tl.load(plane_at(base, 0, tl.int32) + index, mask=ok, other=0)
    blk = first_block + tl.arange(0, BLOCKS)[None, :]
    ok = ok_row & (blk < NB)
    d = super_scales(M, base, tr, rr, 0, blk, ok, False, False)
    plane = plane_at(base, M.scales, tl.uint8)
    stored = stored_scales(M, plane, tr, rr, 0, blk, ok, False, False)
    scale = _spread(scale_values(M, stored, d), ROWS, BLOCKS)
    w = _codes(M, words, ROWS, BLOCKS * 32).to(tl.float32) * scale
    if M.has_min:
        plane = plane_at(base, M.minimums, tl.uint8)
        stored = stored_scales(M, plane, tr, rr, 0, blk, ok, False, False)
        w = w - _spread(scale_values(M, stored, d[1:]), ROWS, BLOCKS)
    # codes of absent blocks decode to a bias times a scale of 0, or of E8M0's smallest number
    ok = ok_row & (first_block * 32 + tl.arange(0, BLOCKS * 32)[None, :] < M.n_cols)
    return tl.where(ok, w, 0.0)


@triton.jit
def float_values(M: tl.constexpr, base, row, first_col, COLS: tl.constexpr):
    """[ROWS, COLS] of float rows in their own type; rows and columns beyond the matrix are 0."""
    if M.dtype == "BF16":
        p = base.to(tl.pointer_type(tl.bfloat16))
    elif M.dtype == "F16":
        p = base.to(tl.pointer_type(tl.float16))
    else:
        p = base.to(tl.pointer_type(tl.float32))
    if M.vector > 1:
        p = tl.multiple_of(p, 16)
    col = first_col + tl.arange(0, COLS)[None, :]
    ok = (row[:, None] < M.n_rows) & (col < M.n_cols)
    return tl.load(p + row[:, None].to(tl.int64) * M.n_cols + col, mask=ok, other=0.0)


@triton.jit
def matrix_values(
    M: tl.constexpr, IS_TILES: tl.constexpr, base, row, first_col, COLS: tl.constexpr
):
    """f32 [ROWS, COLS] of either kind; tiles: first_col and COLS are multiples of 32."""
    if IS_TILES:
        return tile_values(M, base, row, first_col // 32, COLS // 32)
    else:
        return float_values(M, base, row, first_col, COLS).to(tl.float32)
