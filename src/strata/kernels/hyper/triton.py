# mypy: allow-untyped-defs, allow-untyped-decorators
"""The READ of hyper-connections on the GPU, after ``rms_norm.triton.add_norm`` made the normed xn.

Float matrices (stored F32, F16 or BF16): two launches,
    down     lo = silu(W_down xn / C) and coeff = 2 * sigmoid(W_inject xn / C)
    up_mix   x[d] = mean over c of sigmoid(W_up[c * D + d] . lo) * xn[c, d], int8 as well
Any other type goes through general products, with the small kernels ``rank_gate`` behind the down
product and ``mix`` behind the up product.

The order of a product's sums never depends on T (kernels/triton_floats).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.pointwise.triton import quantized_args, quantized_slots, sigmoid, silu
from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import store_blocks
from strata.kernels.triton_common import EXACT
from strata.kernels.triton_floats import load_runs, runs_times, token_runs

_DOWN_ROWS, DOWN_RUNS = 2, 256
_UP_COLS, UP_RUNS = 32, 8


@triton.jit
def _store_rank(y, row, t, lo, coeff, R: tl.constexpr, C: tl.constexpr):
    """Rows of [down; inject] times xn of token t: what READ makes of them."""
    tl.store(lo + t * R + row, silu(y / C), mask=row < R)
    tl.store(coeff + t * C + row - R, 2.0 * sigmoid(y / C), mask=(row >= R) & (row < R + C))


@triton.jit
def down_product(
    steps, dtype: tl.constexpr, row, xn, lo, coeff, T: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """ROWS loaded rows times xn of every token; ``row`` counts on through [down; inject]."""
    later = token_runs(xn, N, RUNS)
    for t in tl.static_range(T):
        x_steps = later
        if t + 1 < T:
            later = token_runs(xn + (t + 1) * N, N, RUNS)
        acc = tl.zeros((ROWS, RUNS), tl.float32)
        acc = runs_times(steps, x_steps, N, RUNS, dtype, acc)
        _store_rank(tl.sum(acc, axis=1), row, t, lo, coeff, R, C)


@triton.jit
def _down_rows(
    w, w_row, row, xn, lo, coeff, T: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    steps = load_runs(w, w_row[:, None], N, RUNS)
    down_product(steps, w.dtype.element_ty, row, xn, lo, coeff, T, N, R, C, ROWS, RUNS)


@triton.jit
def down_kernel(
    xn, down, inject, lo, coeff, T: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, INJECT: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Program p: ROWS rows of down [R, N], or (the last programs) of inject [C, N]."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    if INJECT:
        if first >= R:
            w_row = tl.minimum(row - R, C - 1)
            _down_rows(inject, w_row, row, xn, lo, coeff, T, N, R, C, ROWS, RUNS)
        else:
            _down_rows(down, row, row, xn, lo, coeff, T, N, R, C, ROWS, RUNS)
    else:
        _down_rows(down, row, row, xn, lo, coeff, T, N, R, C, ROWS, RUNS)


def down(
    xn_TN: torch.Tensor,
    down_RN: GpuWeight,
    inject_CN: GpuWeight | None,
    streams: int,
    lo_TR: torch.Tensor,
    coeff_TC: torch.Tensor | None,
) -> None:
    """lo and the write coefficients from the normed streams xn f32 [T, N = C * D]. One launch.

    down_RN, inject_CN: float rows (inject None: the head's read). lo_TR: f32 [T, rank]; coeff_TC:
    f32 [T, C].
    """
    (n_tokens, width), rank = xn_TN.shape, down_RN.n_rows
    assert rank % _DOWN_ROWS == 0 and width % 8 == 0, f"rank {rank}, width {width}"
    assert (inject_CN is None) == (coeff_TC is None), "coefficients come from inject"
    rows = rank + (streams if inject_CN is not None else 0)
    down_kernel[(triton.cdiv(rows, _DOWN_ROWS),)](
        xn_TN, float_rows(down_RN), float_rows(inject_CN or down_RN), lo_TR,
        lo_TR if coeff_TC is None else coeff_TC, T=n_tokens, N=width, R=rank, C=streams,
        INJECT=inject_CN is not None, ROWS=_DOWN_ROWS, RUNS=DOWN_RUNS, num_warps=8,
        maxnreg=128, **EXACT,  # two programs a multiprocessor, else they take two turns
    )  # fmt: skip


def write_coefficients(
    xn_TN: torch.Tensor, inject_CN: GpuWeight, streams: int, coeff_TC: torch.Tensor
) -> None:
    """Only the coefficients that ``down`` makes, with their bits. One launch."""
    n_tokens, width = xn_TN.shape
    assert width % 8 == 0, f"width {width}"
    inject = float_rows(inject_CN)
    down_kernel[(triton.cdiv(streams, _DOWN_ROWS),)](
        xn_TN, inject, inject, coeff_TC, coeff_TC, T=n_tokens, N=width, R=0, C=streams,
        INJECT=True, ROWS=_DOWN_ROWS, RUNS=DOWN_RUNS, num_warps=8, maxnreg=128, **EXACT,
    )  # fmt: skip


@triton.jit
def rank_gate_kernel(
    y, lo, coeff, STRIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Program t: the nonlinearities behind a product of down (and inject) rows."""
    t = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    value = tl.load(y + t * STRIDE + row, mask=row < STRIDE, other=0.0)
    tl.store(lo + t * R + row, silu(value / C), mask=row < R)
    tl.store(coeff + t * C + row - R, 2.0 * sigmoid(value / C), mask=(row >= R) & (row < STRIDE))


def rank_gate(
    y_TS: torch.Tensor, lo_TR: torch.Tensor, coeff_TC: torch.Tensor | None, streams: int
) -> None:
    """lo and coeff from y f32 [T, R + C], the products of the down rows then the inject rows.

    coeff None: y is [T, R]. One launch.
    """
    n_tokens, stride = y_TS.shape
    rank = lo_TR.shape[1]
    assert coeff_TC is None or coeff_TC.shape[1] == streams, "coefficients per stream"
    rank_gate_kernel[(n_tokens,)](
        y_TS, lo_TR, lo_TR if coeff_TC is None else coeff_TC, STRIDE=stride, R=rank, C=streams,
        BLOCK=triton.next_power_of_2(stride), num_warps=2, **EXACT,
    )  # fmt: skip


@triton.jit
def load_normed(xn, d, ok, D: tl.constexpr, C: tl.constexpr):
    """Columns d of every stream of one token's normed streams, [C, COLS]."""
    c = tl.arange(0, C)[:, None]
    return tl.load(xn + c * D + d[None, :], mask=ok[None, :] & (c < C), other=0.0)


@triton.jit
def _store_mix(
    gate, normed, x, q, meta, p, t, d, ok, D: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr,
    SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Columns d = COLS * p and up of token t from their gates [C, COLS], as floats and as int8."""
    y = tl.sum(sigmoid(gate) * normed, axis=0) / C
    tl.store(x + t * D + d, y, mask=ok)
    if QUANTIZE:
        n: tl.constexpr = COLS // 32
        nb: tl.constexpr = D // 32
        block = p * n + tl.arange(0, n)
        store_blocks(
            tl.reshape(y, (n, 32)), block, block < nb, q + t * SLOTS * 32, meta + t * SLOTS * 2,
            nb, n,
        )  # fmt: skip


@triton.jit
def up_rows(p, D: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr):
    """Rows of up, [C * COLS, 1], that columns COLS * p and up of the mix need."""
    r = tl.arange(0, C * COLS)
    return ((r // COLS) * D + tl.minimum(p * COLS + r % COLS, D - 1))[:, None]


@triton.jit
def up_token(
    steps, dtype: tl.constexpr, x_steps, p, t, xn, x, q, meta, D: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, COLS: tl.constexpr, RUNS: tl.constexpr, SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """The loaded rows times lo of token t (its runs), and the mix of columns COLS * p and up."""
    d = p * COLS + tl.arange(0, COLS)
    acc = tl.zeros((C * COLS, RUNS), tl.float32)
    acc = runs_times(steps, x_steps, R, RUNS, dtype, acc)
    gate = tl.reshape(tl.sum(acc, axis=1), (C, COLS))
    normed = load_normed(xn + t * C * D, d, d < D, D, C)
    _store_mix(gate, normed, x, q, meta, p, t, d, d < D, D, C, COLS, SLOTS, QUANTIZE)


@triton.jit
def up_mix_kernel(
    lo, up, xn, x, q, meta, T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    COLS: tl.constexpr, RUNS: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program p: columns COLS * p and up of every stream."""
    p = tl.program_id(0)
    steps = load_runs(up, up_rows(p, D, C, COLS), R, RUNS)
    later = token_runs(lo, R, RUNS)
    for t in tl.static_range(T):
        x_steps = later
        if t + 1 < T:
            later = token_runs(lo + (t + 1) * R, R, RUNS)
        up_token(
            steps, up.dtype.element_ty, x_steps, p, t, xn, x, q, meta, D, R, C, COLS, RUNS, SLOTS,
            QUANTIZE,
        )  # fmt: skip


def up_mix(
    lo_TR: torch.Tensor,
    up_NR: GpuWeight,
    xn_TN: torch.Tensor,
    streams: int,
    x_TD: torch.Tensor,
    quantized: Quantized | None = None,
) -> None:
    """The block's input x f32 [T, D] from lo and xn, and its int8 form. One launch.

    up_NR: float rows [C * D, rank], rank a multiple of 8. streams: a power of two.
    """
    n_tokens, width = xn_TN.shape
    check_mix(width, streams, quantized)
    assert up_NR.n_cols % 8 == 0, f"a rank of {up_NR.n_cols} is not a multiple of 8"
    up_mix_kernel[(triton.cdiv(width // streams, _UP_COLS),)](
        lo_TR, float_rows(up_NR), xn_TN, x_TD, *quantized_args(quantized, x_TD), T=n_tokens,
        D=width // streams, R=up_NR.n_cols, C=streams, COLS=_UP_COLS, RUNS=UP_RUNS,
        SLOTS=quantized_slots(quantized), QUANTIZE=quantized is not None, num_warps=8, **EXACT,
    )  # fmt: skip


@triton.jit
def mix_kernel(
    gate, xn, x, q, meta, N: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr,
    SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program (p, t): COLS columns of token t."""
    t = tl.program_id(1)
    D: tl.constexpr = N // C
    p = tl.program_id(0)
    d = p * COLS + tl.arange(0, COLS)
    g = load_normed(gate + t * N, d, d < D, D, C)
    normed = load_normed(xn + t * N, d, d < D, D, C)
    _store_mix(g, normed, x, q, meta, p, t, d, d < D, D, C, COLS, SLOTS, QUANTIZE)


def mix(
    gate_TN: torch.Tensor,
    xn_TN: torch.Tensor,
    streams: int,
    x_TD: torch.Tensor,
    quantized: Quantized | None = None,
) -> None:
    """``up_mix`` with the product W_up lo already made: gate f32 [T, C * D]. One launch."""
    n_tokens, width = xn_TN.shape
    check_mix(width, streams, quantized)
    cols = 128
    mix_kernel[(triton.cdiv(width // streams, cols), n_tokens)](
        gate_TN, xn_TN, x_TD, *quantized_args(quantized, x_TD), N=width, C=streams, COLS=cols,
        SLOTS=quantized_slots(quantized), QUANTIZE=quantized is not None, num_warps=4, **EXACT,
    )  # fmt: skip


def check_mix(width: int, streams: int, quantized: Quantized | None) -> None:
    assert streams & (streams - 1) == 0, f"{streams} streams: a power of two is needed"
    assert quantized is None or width // streams % 32 == 0, "columns are whole blocks of 32"


def float_rows(weight: GpuWeight) -> torch.Tensor:
    assert not weight.is_tiles and weight.scale == 1.0, "tiles take general products"
    return weight.data
