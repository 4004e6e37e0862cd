# mypy: allow-untyped-defs, allow-untyped-decorators
"""Block selection on the GPU: scores of every complete block, then the best of them. Two launches.

Nothing is computed for tokens whose complete blocks fit the budget; their rows of ``blocks`` stay
as they are, and kernels/attention does not read them. (Index queries and block keys come from
kernels/attention/triton_append.)

Scores are >= 0, so their bits order like they do. A program closes in on the lowest kept score of a
token by counting how many reach each of seven marks, until as many reach the lower bound as are
wanted or the bounds are neighbours; then it lists what lies above, and of equals the first ones.
The score of a block depends on no other block or token.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from strata.kernels.attention.triton import f32_dot, powers
from strata.kernels.triton_common import EXACT, INTERPRET, interpreted_int


@triton.jit
def scores_kernel(
    q, keys, pos, scores, root, T: tl.constexpr, IH: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, R: tl.constexpr, BUDGET: tl.constexpr,
    CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Program p scores runs p, p + PROGRAMS, ... of BLOCK_B blocks for all T tokens."""
    n_blocks = (tl.load(pos + T - 1) + 1) // R
    if n_blocks > BUDGET:
        # rows of 8 tokens, however many there are: one shape, one order of sums
        m = tl.arange(0, 8 * IH)
        d = tl.arange(0, BLOCK_D)
        q_MD = tl.load(
            q + m[:, None] * D + d[None, :],
            mask=(m < T * IH)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        power, inverse = powers(q_MD)
        q_MD = q_MD * inverse[:, None]
        t = tl.arange(0, 8)[:, None]
        first = tl.program_id(0) * BLOCK_B
        for b0 in range(
            interpreted_int(first) if INTERPRET else first,
            interpreted_int(n_blocks) if INTERPRET else n_blocks,
            PROGRAMS * BLOCK_B,
        ):
            b = b0 + tl.arange(0, BLOCK_B)
            ok_b = b < n_blocks
            at = keys + b[:, None].to(tl.int64) * D + d[None, :]
            key_BD = tl.load(at, mask=ok_b[:, None] & (d < D)[None, :], other=0.0)
            product = f32_dot(q_MD, tl.trans(key_BD)) * power[:, None]
            score = tl.sum(tl.reshape(tl.maximum(product, 0.0), (8, IH, BLOCK_B)), axis=1)
            score = tl.div_rn(score, tl.zeros_like(score) + root)
            tl.store(scores + t * CAPACITY + b[None, :], score, mask=(t < T) & ok_b[None, :])


@triton.jit
def _bits(scores, first, n, BLOCK: tl.constexpr):
    """Score bits of blocks first .. first + BLOCK - 1; -1 from n on."""
    b = first + tl.arange(0, BLOCK)
    bits = tl.load(scores + b, mask=b < n, other=0.0).to(tl.int32, bitcast=True)
    # -0.0 does not occur: maximum(x, 0) and sums from +0 leave +0
    return tl.where(b < n, bits, -1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _add3(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _counts(bits, base, step):
    """How many reach base + step * 1, ... * 7: 20 bits each in three int64."""
    a = (bits >= base + step).to(tl.int64)
    a += (bits >= base + step * 2).to(tl.int64) << 20
    a += (bits >= base + step * 3).to(tl.int64) << 40
    b = (bits >= base + step * 4).to(tl.int64)
    b += (bits >= base + step * 5).to(tl.int64) << 20
    b += (bits >= base + step * 6).to(tl.int64) << 40
    c = (bits >= base + step * 7).to(tl.int64)
    return tl.reduce((a, b, c), 0, _add3)


@triton.jit
def _count_all(scores, bits, n, base, step, BLOCK: tl.constexpr):
    """``_counts`` over all n blocks as seven int32; bits: those of the first BLOCK."""
    a, b, c = _counts(bits, base, step)
    for first in range(BLOCK, interpreted_int(n) if INTERPRET else n, BLOCK):
        x, y, z = _counts(_bits(scores, first, n, BLOCK), base, step)
        a, b, c = a + x, b + y, c + z
    counts = ()
    for k in tl.static_range(7):
        word = a if k < 3 else (b if k < 6 else c)
        counts = counts + (((word >> (20 * (k % 3))) & 0xFFFFF).to(tl.int32),)
    return counts


@triton.jit
def _narrow(counts, base, step, low, high, at_low, at_high, BUDGET: tl.constexpr):
    """The bounds after a count: at least BUDGET scores reach low, fewer reach high."""
    for i in tl.static_range(7):
        mark = base + step * (7 - i)
        below = (counts[6 - i] < BUDGET) & (mark < high)
        high = tl.where(below, mark, high)
        at_high = tl.where(below, counts[6 - i], at_high)
    for i in tl.static_range(7):
        mark = base + step * (i + 1)
        reached = (counts[i] >= BUDGET) & (mark > low)
        low = tl.where(reached, mark, low)
        at_low = tl.where(reached, counts[i], at_low)
    return low, high, at_low, at_high


@triton.jit
def _threshold(scores, bits, n, BUDGET: tl.constexpr, BLOCK: tl.constexpr):
    """(least, spare): kept are the scores above least and the first ``spare`` equal to it."""
    top = tl.reduce(bits, 0, _larger)
    for first in range(BLOCK, interpreted_int(n) if INTERPRET else n, BLOCK):
        top = tl.maximum(top, tl.reduce(_bits(scores, first, n, BLOCK), 0, _larger))
    low, high = n * 0, top + 1
    at_low, at_high = n, n * 0
    # first the four factors of two below the largest, by halves; then eighths of what is left
    step = n * 0 + (1 << 22)
    base = tl.maximum(high - step * 8, 0)
    counts = _count_all(scores, bits, n, base, step, BLOCK)
    low, high, at_low, at_high = _narrow(counts, base, step, low, high, at_low, at_high, BUDGET)
    while (high - low > 1) & (at_low > BUDGET):
        step = tl.maximum((high - low) // 8, 1)
        counts = _count_all(scores, bits, n, low, step, BLOCK)
        low, high, at_low, at_high = _narrow(counts, low, step, low, high, at_low, at_high, BUDGET)
    exact = at_low == BUDGET
    return tl.where(exact, low - 1, low), tl.where(exact, 0, BUDGET - at_high)


@triton.jit
def _list(bits, first, least, spare, above, equal, out, BLOCK: tl.constexpr):
    """Write kept blocks of one run behind those of the runs before; spare: kept equals of least."""
    is_above = (bits > least).to(tl.int32)
    is_equal = (bits == least).to(tl.int32)
    # both running counts in one scan; a run has fewer than 2^15 blocks
    counts = tl.cumsum(is_above + (is_equal << 16), axis=0)
    n_above = above + (counts & 0xFFFF)
    n_equal = equal + (counts >> 16)
    kept = (is_above > 0) | ((is_equal > 0) & (n_equal <= spare))
    slot = n_above + tl.minimum(n_equal, spare) - 1
    tl.store(out + slot, first + tl.arange(0, BLOCK), mask=kept)
    return above + tl.sum(is_above, axis=0), equal + tl.sum(is_equal, axis=0)


@triton.jit
def select_kernel(
    scores, pos, blocks, R: tl.constexpr, BUDGET: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t."""
    t = tl.program_id(0)
    n = (tl.load(pos + t) + 1) // R
    if n > BUDGET:
        row = scores + t * CAPACITY
        bits = _bits(row, 0, n, BLOCK)
        least, spare = _threshold(row, bits, n, BUDGET, BLOCK)
        out = blocks + t * BUDGET
        zero = n * 0
        above, equal = _list(bits, 0, least, spare, zero, zero, out, BLOCK)
        for first in range(BLOCK, interpreted_int(n) if INTERPRET else n, BLOCK):
            next_bits = _bits(row, first, n, BLOCK)
            above, equal = _list(next_bits, first, least, spare, above, equal, out, BLOCK)


def select_blocks(
    q_TId: torch.Tensor,
    key_Bd: torch.Tensor,
    pos_T: torch.Tensor,
    block_tokens: int,
    scores_TB: torch.Tensor,
    blocks_Tm: torch.Tensor,
    *,
    programs: int = 128,
    run: int = 8192,
) -> None:
    """blocks[t]: kept blocks of token t, ascending, if it has more than the budget. Two launches.

    q_TId: f32 [T, I, d], contiguous. key_Bd: f16 or f32 [capacity, d], contiguous; key j is valid
    when block j is complete. pos_T: int32 [T], consecutive. scores_TB: f32 [T, capacity], scratch.
    blocks_Tm: int32 [T, budget]. programs, run: of the scores; blocks a turn of the selection
    (powers of two).
    """
    n_tokens, n_heads, dim = q_TId.shape
    capacity, budget = scores_TB.shape[1], blocks_Tm.shape[1]
    assert len(key_Bd) <= capacity < 1 << 20, f"{len(key_Bd)} keys, room for {capacity} scores"
    assert n_tokens <= 8 and n_heads & (n_heads - 1) == 0 and n_heads > 1, q_TId.shape
    run = min(run, triton.next_power_of_2(capacity))
    block_b = 32
    scores_kernel[(programs,)](
        q_TId, key_Bd, pos_T, scores_TB, math.sqrt(dim), T=n_tokens, IH=n_heads, D=dim,
        BLOCK_D=triton.next_power_of_2(dim), BLOCK_B=block_b, R=block_tokens, BUDGET=budget,
        CAPACITY=capacity, PROGRAMS=programs, num_warps=4, **EXACT,
    )  # fmt: skip
    select_kernel[(n_tokens,)](
        scores_TB, pos_T, blocks_Tm, R=block_tokens, BUDGET=budget, CAPACITY=capacity, BLOCK=run,
        num_warps=max(1, min(32, run // 256)), **EXACT,
    )  # fmt: skip
