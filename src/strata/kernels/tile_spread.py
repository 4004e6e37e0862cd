# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products with tiles whose blocks are spread over a program's threads: contract 3, bit for bit.

``tile_product`` gives a segment of a row to one lane, which meets its blocks one after the other;
with long rows and few programs that chain is the time. Here some blocks of every segment are
multiplied at once, by a thread each, and all weights are asked for in the beginning. What a block
adds is an fma or more whose two factors depend on no other block; they go through shared memory to
the lane of the segment, which makes the fmas, blocks ascending: same factors, order and bits.

Blocks are taken in the order of activation slots: slot k is block k // 8 of segment k % 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.tile_product import (
    block_codes,
    block_terms,
    code_table,
    load_block,
    load_x,
    scale_values,
)
from strata.kernels.triton_common import INTERPRET, SEGMENTS, fma, fold8
from strata.kernels.triton_shared import get2, get4, put2, put4

_AHEAD = tl.constexpr(8)
"""Blocks of a segment whose factors are loaded before the first is added."""


@triton.jit
def _place(S: tl.constexpr, r, slot):
    """Bytes from the room to a row's factors: the four rows of a thread lie apart."""
    if S.rows > 4:
        r = (r % 4) * (S.rows // 4) + r // 4
    return slot * S.slot_bytes + r * S.row_bytes


@triton.jit
def _put_factors(S: tl.constexpr, at, terms):
    """Store a block's factors."""
    N: tl.constexpr = len(terms)
    wide = ()
    for i in tl.static_range(N):
        wide = wide + (tl.broadcast_to(terms[i], at.shape),)
    if N == 2:
        put2(at, wide[0], wide[1])
    else:
        for i in tl.static_range(N // 4):
            there = at + i * S.plane_bytes
            put4(there, wide[4 * i], wide[4 * i + 1], wide[4 * i + 2], wide[4 * i + 3])


@triton.jit
def _get_factors(S: tl.constexpr, at, N: tl.constexpr):
    """What ``_put_factors`` stored there."""
    if N == 2:
        return get2(at)
    else:
        terms = ()
        for i in tl.static_range(N // 4):
            terms = terms + get4(at + i * S.plane_bytes)
        return terms


@triton.jit
def _add_block(p, terms, ok, ALL: tl.constexpr):
    """Partial sums p [8, ROWS] plus one block of every segment."""
    y = p
    for i in tl.static_range(len(terms) // 2):
        y = fma(terms[2 * i], terms[2 * i + 1], y)
    if ALL:
        return y
    else:
        return tl.where(ok, y, p)  # even adding +0 would change a partial sum of -0


@triton.jit
def _add_round(
    S: tl.constexpr, at, p, i0: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """COUNT blocks of every segment from block i0 on, whose factors are loaded together."""
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    seg = tl.arange(0, SEGMENTS)[:, None]
    loaded = ()
    for u in tl.static_range(COUNT):
        if i0 + u < L:
            loaded = loaded + _get_factors(S, at + u * SEGMENTS * S.slot_bytes, N)
    for u in tl.static_range(COUNT):
        if i0 + u < L:
            ok = seg * L + i0 + u < NB
            p = _add_block(p, loaded[u * N : u * N + N], ok, NB % 8 == 0)
    return p


@triton.jit
def _add_blocks(
    S: tl.constexpr, room, p, i0: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """COUNT blocks of every segment from block i0 on, whose factors begin at ``room``."""
    at = room + _place(S, tl.arange(0, S.rows)[None, :], tl.arange(0, SEGMENTS)[:, None])
    for c in tl.static_range((COUNT + _AHEAD - 1) // _AHEAD):
        here = at + c * _AHEAD * SEGMENTS * S.slot_bytes
        p = _add_round(S, here, p, i0 + c * _AHEAD, min(COUNT - c * _AHEAD, _AHEAD), N, NB)
    return p


@triton.jit
def _take_block(x, u: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Interpreter: block u of every segment out of a step's numbers."""
    bits = tl.broadcast_to(x, (SEGMENTS * BLOCKS, ROWS)).to(tl.int32, bitcast=True)
    mine = tl.arange(0, BLOCKS)[:, None, None] == u
    bits = tl.where(mine, tl.reshape(bits, (BLOCKS, SEGMENTS, ROWS)), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _plain_blocks(S: tl.constexpr, p, terms, i0, NB: tl.constexpr):
    """Interpreter: what ``_add_blocks`` does, without shared memory."""
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    seg = tl.arange(0, SEGMENTS)[:, None]
    for u in tl.static_range(S.blocks):
        taken = ()
        for i in tl.static_range(len(terms)):
            taken = taken + (_take_block(terms[i], u, S.blocks, S.rows),)
        p = _add_block(p, taken, (i0 + u < L) & (seg * L + i0 + u < NB), False)
    return p


@triton.jit
def _load_step(M: tl.constexpr, S: tl.constexpr, base, row, n, NARROW: tl.constexpr):
    """The weights of step n, unconverted."""
    NB: tl.constexpr = M.n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    ROWS_OK: tl.constexpr = M.tile_rows * 16 % S.rows == 0
    ALL: tl.constexpr = ROWS_OK and NB % 8 == 0 and L % S.blocks == 0
    k = tl.arange(0, SEGMENTS * S.blocks)[:, None]
    i = n * S.blocks + k // SEGMENTS
    blk = (k % SEGMENTS) * L + i
    tr = row // 16
    ok = (i < L) & (blk < NB)
    if not ROWS_OK:
        ok = ok & (tr < M.tile_rows)
    return load_block(M, base, tr, row % 16, 0, blk, ok, ALL, NARROW)


@triton.jit
def _load_xs(S: tl.constexpr, q, meta, n, NB: tl.constexpr):
    """The activations of step n of every token."""
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    WIDTH: tl.constexpr = SEGMENTS * S.blocks
    slot = tl.minimum(n * WIDTH + tl.arange(0, WIDTH)[:, None], SEGMENTS * L - 1)
    xs = ()
    for t in tl.static_range(len(q)):
        xs = xs + (load_x(q[t], meta[t], slot, True),)
    return xs


@triton.jit
def _step(
    M: tl.constexpr, S: tl.constexpr, room, table, block, xs, acc, n: tl.constexpr,
):  # fmt: skip
    """Step n multiplied; its sums too, where the room does not hold all steps."""
    T: tl.constexpr = len(xs)
    NB: tl.constexpr = M.n_cols // 32
    words, scales, minima, supers = block
    codes = block_codes(M, table, words)
    scales = scale_values(M, scales, supers)
    if M.has_min:
        minima = scale_values(M, minima, supers[1:])
    k = tl.arange(0, SEGMENTS * S.blocks)[:, None]
    # two steps in turns: who stores here has passed the barrier that follows the last reading
    slot = (n if S.at_end else n % 2) * SEGMENTS * S.blocks
    at = room + _place(S, tl.arange(0, S.rows)[None, :], slot + k)
    new = ()
    for t in tl.static_range(T):
        terms = block_terms(M, codes, scales, minima, xs[t])
        if INTERPRET:
            new = new + (_plain_blocks(S, acc[t], terms, n * S.blocks, NB),)
        else:
            _put_factors(S, at + t * S.n_bytes, terms)
    if not INTERPRET and not S.at_end:
        tl.debug_barrier()
        for t in tl.static_range(T):
            here = room + t * S.n_bytes + slot * S.slot_bytes
            new = new + (_add_blocks(S, here, acc[t], n * S.blocks, S.blocks, S.numbers, NB),)
    return new if len(new) > 0 else acc


@triton.jit
def spread_products(
    M: tl.constexpr, S: tl.constexpr, base, room, first_row, q, meta, NARROW: tl.constexpr
):
    """Rows first_row .. first_row + S.rows - 1 of a matrix in tiles times some tokens.

    M: TileMatrix. S: Spread (linear/launch). base: int64 address, a multiple of 16. room: address
    of S.n_bytes shared bytes for each token, used by nothing else (any number in the interpreter).
    q, meta: pointers of each token (kernels/quantize). NARROW: a thread has fewer than four rows.
    Returns a tuple of f32 [S.rows], one for each token. Rows from 16 * tile_rows on are not read;
    their results mean nothing.
    """
    NB: tl.constexpr = M.n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    STEPS: tl.constexpr = (L + S.blocks - 1) // S.blocks
    ROWS: tl.constexpr = S.rows
    row = (first_row + tl.arange(0, ROWS))[None, :]
    acc = ()
    for _ in tl.static_range(len(q)):
        acc = acc + (tl.zeros((SEGMENTS, ROWS), tl.float32),)
    table = code_table(M)
    xs = _load_xs(S, q, meta, 0, NB)
    blocks = ()
    for n in tl.static_range(STEPS):
        blocks = blocks + (_load_step(M, S, base, row, n, NARROW),)
    for n in tl.static_range(STEPS):
        later = _load_xs(S, q, meta, n + 1, NB)
        acc = _step(M, S, room, table, blocks[n], xs, acc, n)
        xs = later
    if not INTERPRET and S.at_end:
        tl.debug_barrier()
    y = ()
    for t in tl.static_range(len(q)):
        p = acc[t]
        if not INTERPRET and S.at_end:
            p = _add_blocks(S, room + t * S.n_bytes, p, 0, L, S.numbers, NB)
        y = y + (fold8(p, ROWS),)
    return y
