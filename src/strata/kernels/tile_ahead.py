# mypy: allow-untyped-defs, allow-untyped-decorators
"""``tile_product`` with weights that come straight into registers, some blocks ahead of their use.

The same terms in the same order, so the same bits. Asynchronous copies need shared memory and two
barriers a block; here a program has none, at the price of registers: for few tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.tile_product import (
    add_loaded,
    code_table,
    load_block,
    load_xs,
)
from strata.kernels.triton_common import SEGMENTS, fold8, opaque_zero, twin_lanes, twins_apart


@triton.jit
def _fetch(
    M: tl.constexpr, base, tr, rr, lift, i, L: tl.constexpr, ROWS_OK: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Block i of every segment, unconverted; nothing is read from block L on."""
    blk = tl.arange(0, SEGMENTS)[:, None] * L + i
    ok = (blk < M.n_cols // 32) & (i < L)
    if not ROWS_OK:
        ok = ok & (tr < M.tile_rows)
    return load_block(M, base, tr, rr, lift, blk, ok, False, NARROW)


@triton.jit
def _add(M: tl.constexpr, table, block, i, xs, acc, L: tl.constexpr, AHEAD: tl.constexpr):
    """Block i of every segment added to the partial sums of every token."""
    NB: tl.constexpr = M.n_cols // 32
    blk = tl.arange(0, SEGMENTS)[:, None] * L + i
    ok = (blk < NB) & (i < L)
    return add_loaded(M, table, block, xs, acc, ok, NB % 8 == 0 and L % AHEAD == 0)


@triton.jit
def _sum_blocks(
    M: tl.constexpr, base, tr, rr, lift, q, meta, LANES: tl.constexpr, AHEAD: tl.constexpr,
    ROWS_OK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Some rows times every token: a tuple of f32 [LANES]; tr, rr, lift as in ``tile_product``."""
    L: tl.constexpr = (M.n_cols // 32 + SEGMENTS - 1) // SEGMENTS
    blocks = ()
    for u in tl.static_range(AHEAD):
        blocks = blocks + (_fetch(M, base, tr, rr, lift, u, L, ROWS_OK, NARROW),)
    acc = ()
    for _ in tl.static_range(len(q)):
        acc = acc + (tl.zeros((SEGMENTS, LANES), tl.float32),)
    table = code_table(M)
    xs = load_xs(q, meta, 0, False)
    if L <= AHEAD:
        for u in tl.static_range(L):
            later = load_xs(q, meta, min(u + 1, L - 1), True)
            acc = _add(M, table, blocks[u], u, xs, acc, L, AHEAD)
            xs = later
    else:
        # the open count keeps the loop; AHEAD blocks a turn, so that no register is moved
        for i0 in tl.range(0, L + opaque_zero(), AHEAD, num_stages=1):
            ahead = ()
            for u in tl.static_range(AHEAD):
                i = i0 + u
                later = load_xs(q, meta, tl.minimum(i + 1, L - 1), True)
                block = blocks[u]
                ahead = ahead + (_fetch(M, base, tr, rr, lift, i + AHEAD, L, ROWS_OK, NARROW),)
                acc = _add(M, table, block, i, xs, acc, L, AHEAD)
                xs = later
            blocks = ahead
    y = ()
    for t in tl.static_range(len(q)):
        y = y + (fold8(acc[t], LANES),)
    return y


@triton.jit
def tile_products_ahead(
    M: tl.constexpr, base, first_row, q, meta,
    ROWS: tl.constexpr, AHEAD: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """``tile_products`` of one matrix, AHEAD blocks of a segment in registers."""
    ROWS_OK: tl.constexpr = M.tile_rows * 16 % ROWS == 0
    row = (first_row + tl.arange(0, ROWS))[None, :]
    return _sum_blocks(M, base, row // 16, row % 16, 0, q, meta, ROWS, AHEAD, ROWS_OK, NARROW)


@triton.jit
def twin_products_ahead(
    M: tl.constexpr, base, lift, first_row, q, meta,
    ROWS: tl.constexpr, AHEAD: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """``twin_products`` with AHEAD blocks of a segment in registers."""
    ROWS_OK: tl.constexpr = M.tile_rows * 16 % ROWS == 0
    LANES: tl.constexpr = 2 * ROWS
    tr, rr, lift = twin_lanes(first_row, lift, ROWS)
    both = _sum_blocks(M, base, tr, rr, lift, q, meta, LANES, AHEAD, ROWS_OK, NARROW)
    return twins_apart(both, ROWS)
