# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products with few long rows in tiles: all blocks of a row at once, then the contract's sums.

``linear.triton`` gives a row's segment to one lane, which waits for each of its blocks in turn.
Where rows are few, that is all the GPU does. Here a program owns some rows and spreads their blocks
over its threads; each thread makes the two factors of a block's fma (exact dot, product of scales;
with minimums two pairs, with groups of 16 twice as many) and leaves them in a workspace that stays
in the nearest cache. After a barrier lanes of [8 segments, rows] only add, blocks ascending. The
factors and the order are the contract's (docs/decisions/001, section 3), so the bits are too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.gpu_matrix import factors, tile_matrix
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.launch import MOST_TOKENS
from strata.kernels.quantize.ref import Quantized
from strata.kernels.tile_product import (
    block_codes,
    block_terms,
    code_table,
    load_block,
    load_x,
    scale_values,
)
from strata.kernels.triton_common import EXACT, SEGMENTS, fma, fold8

_AHEAD = tl.constexpr(8)
"""Blocks of a segment whose factors are loaded before the first is added."""
_FEW_ROWS, _LONG_COLS = 640, 8192


@dataclass(frozen=True)
class LongTuning:
    """rows a program, blocks that its threads work on at once (powers of two), warps, stages."""

    rows: int
    blocks: int
    warps: int
    stages: int


LONG = LongTuning(4, 256, 8, 1)
"""Best or within 2 % of it on an H200 for 1 and 4 tokens, 10240 -> 320: 9.3 us, against 16 and 19
by ``linear.triton``. At 6144 -> 2560 the two are equal for 1 token, at 4 this one is slower."""


def is_long(weight: GpuWeight) -> bool:
    """Whether ``linear_long`` is the faster product (few rows, many blocks)."""
    return weight.is_tiles and weight.n_rows <= _FEW_ROWS and weight.n_cols >= _LONG_COLS


def workspace_numbers(weight: GpuWeight, n_tokens: int, tuning: LongTuning | None = None) -> int:
    """f32 numbers that a launch needs as workspace."""
    matrix = tile_matrix(weight.type, weight.n_rows, weight.n_cols)
    tuning = tuning or LONG
    rows = triton.cdiv(weight.n_rows, tuning.rows) * tuning.rows
    return rows * (weight.n_cols // 32) * factors(matrix) * n_tokens


@triton.jit
def _make_factors(
    M: tl.constexpr, base, table, tr, rr, b, q, meta, space, T: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Factors of blocks b [BLOCKS, 1] of rows (tr, rr) [1, ROWS] for every token."""
    NB: tl.constexpr = M.n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    ok = (b < NB) & (tr < M.tile_rows)
    words, scales, minima, supers = load_block(M, base, tr, rr, 0, b, ok, False, NARROW)
    codes = block_codes(M, table, words)
    scales = scale_values(M, scales, supers)
    if M.has_min:
        minima = scale_values(M, minima, supers[1:])
    at = tl.minimum(b, NB - 1)
    slot = (at % L) * SEGMENTS + at // L
    r = tl.arange(0, ROWS)[None, :]
    for t in tl.static_range(T):
        x = load_x(q + t * (SLOTS * 32), meta + t * (SLOTS * 2), slot)
        terms = block_terms(M, codes, scales, minima, x)
        for i in tl.static_range(N):
            p = space + ((t * N + i) * NB + b) * ROWS + r
            tl.store(p, tl.broadcast_to(terms[i], ok.shape), mask=ok)


@triton.jit
def _add_factors(
    space, T: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, NB: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The sums of LANES = tokens * ROWS lanes, f32 [LANES]."""
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    lane = tl.arange(0, LANES)[None, :]
    first = tl.arange(0, SEGMENTS)[:, None] * L
    at = space + (lane // ROWS * (N * NB) + first) * ROWS + lane % ROWS
    p = tl.zeros((SEGMENTS, LANES), tl.float32)
    for i0 in range(0, L, _AHEAD):
        loaded = ()
        for u in tl.static_range(_AHEAD):
            ok = (i0 + u < L) & (first + i0 + u < NB) & (lane < T * ROWS)
            for n in tl.static_range(N):
                loaded = loaded + (
                    tl.load(at + (n * NB + i0 + u) * ROWS, mask=ok, other=0.0),
                )  # fmt: skip
        for u in tl.static_range(_AHEAD):
            y = p
            for n in tl.static_range(N // 2):
                y = fma(loaded[u * N + 2 * n], loaded[u * N + 2 * n + 1], y)
            ok = (i0 + u < L) & (first + i0 + u < NB)
            p = tl.where(ok, y, p)  # even adding +0 would change a partial sum of -0
    return fold8(p, LANES)


@triton.jit
def long_kernel(
    q, meta, base, out, scale, space,
    M: tl.constexpr, T: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program p: rows p * ROWS and up, for all T tokens. N: factors of a block."""
    NB: tl.constexpr = M.n_cols // 32
    first_row = tl.program_id(0) * ROWS
    space += tl.program_id(0).to(tl.int64) * (T * N * NB * ROWS)
    row = (first_row + tl.arange(0, ROWS))[None, :]
    table = code_table(M)
    for b0 in tl.range(0, NB, BLOCKS, num_stages=STAGES):
        b = b0 + tl.arange(0, BLOCKS)[:, None]
        _make_factors(
            M, base, table, row // 16, row % 16, b, q, meta, space, T, SLOTS, ROWS, N, NARROW
        )
    tl.debug_barrier()  # other threads of this program read the factors
    y = _add_factors(space, T, LANES, ROWS, NB, N)
    if SCALED:
        y = y * scale
    lane = tl.arange(0, LANES)
    row_of = first_row + lane % ROWS
    ok = (row_of < M.n_rows) & (lane < T * ROWS)
    tl.store(out + (lane // ROWS) * STRIDE + row_of, y, mask=ok)


def linear_long(
    weight: GpuWeight,
    out_TN: torch.Tensor,
    x_q: Quantized,
    workspace: torch.Tensor | None = None,
    tuning: LongTuning | None = None,
) -> None:
    """out[t] = weight x[t] for every token, bit-equal to ``ref.linear_contract``. One launch.

    weight: tiles. out_TN: f32 [T, N], rows contiguous. x_q: the activations (kernels/quantize).
    workspace: f32, at least ``workspace_numbers``, not used by another stream meanwhile; None makes
    one (a recording keeps it).
    """
    n_tokens = len(out_TN)
    assert weight.is_tiles and 1 <= n_tokens <= MOST_TOKENS, (weight.type, n_tokens)
    assert tuple(out_TN.shape) == (n_tokens, weight.n_rows) and out_TN.stride(1) == 1, "out"
    assert x_q.n_cols == weight.n_cols and x_q.n_rows >= n_tokens, "x_q"
    matrix = tile_matrix(weight.type, weight.n_rows, weight.n_cols)
    tuning = tuning or LONG
    needed = workspace_numbers(weight, n_tokens, tuning)
    if workspace is None:
        workspace = torch.empty(needed, device=out_TN.device)
    assert workspace.numel() >= needed, (
        f"a workspace of {workspace.numel()} numbers, {needed} needed"
    )
    long_kernel[(triton.cdiv(weight.n_rows, tuning.rows),)](
        x_q.q, x_q.meta, weight.data.data_ptr(), out_TN, weight.scale, workspace,
        M=matrix, T=n_tokens, SLOTS=x_q.q.shape[1], STRIDE=out_TN.stride(0), ROWS=tuning.rows,
        BLOCKS=tuning.blocks, LANES=triton.next_power_of_2(n_tokens) * tuning.rows,
        N=factors(matrix), STAGES=tuning.stages,
        NARROW=tuning.blocks * tuning.rows < 4 * 32 * tuning.warps, SCALED=weight.scale != 1.0,
        num_warps=tuning.warps, **EXACT,
    )  # fmt: skip
