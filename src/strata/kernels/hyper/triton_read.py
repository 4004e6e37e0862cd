# mypy: allow-untyped-defs, allow-untyped-decorators
"""The READ of hyper-connections in one launch, for float matrices.

    first T * C programs   write what is pending, norm one stream of one token  (rms_norm.triton)
    then                   ``rows`` rows of [down; inject] each, which wait for those
    then                   ``cols`` columns of up and the mix each, which wait for all of down's

A program asks for its weights before it waits, so all bytes of a READ are on their way while the
norm is made. The device functions are those of the single launches and have their bits
(hyper.triton). Without the first programs it is what stands behind ``add_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.hyper.triton import (
    DOWN_RUNS,
    UP_RUNS,
    check_mix,
    down_product,
    float_rows,
    up_rows,
    up_token,
)
from strata.kernels.pointwise.triton import quantized_args, quantized_slots
from strata.kernels.quantize.ref import Quantized
from strata.kernels.rms_norm.triton import Pending, norm_stream
from strata.kernels.triton_common import EXACT
from strata.kernels.triton_floats import load_runs_now, token_runs, words_again
from strata.kernels.triton_turns import arrive, set_back, wait_for, wait_last

_LINE = tl.constexpr(32)
"""int32 numbers of a cache line: each counter has one of its own."""


@dataclass(frozen=True)
class ReadTuning:
    """rows of down and columns of up a program (powers of two; columns from 32 on), warps."""

    rows: int
    cols: int
    warps: int


NARROW, WIDE = ReadTuning(2, 32, 8), ReadTuning(4, 64, 16)


@dataclass(frozen=True)
class StreamWeights:
    """Float rows: norm f32 [C * D], down [R, C * D], inject [C, C * D] (the head: None), up
    [C * D, R]; eps of the norm."""

    norm: torch.Tensor
    down: GpuWeight
    inject: GpuWeight | None
    up: GpuWeight
    eps: float


@triton.jit
def _down_after(
    w, w_row, row, xn, lo, coeff, normed, COUNT: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    steps = load_runs_now(w, w_row[:, None], N, RUNS)
    if COUNT > 0:
        wait_for(normed, COUNT)
    down_product(steps, w.dtype.element_ty, row, xn, lo, coeff, T, N, R, C, ROWS, RUNS)


@triton.jit
def read_kernel(
    residual, out, out_coeff, bias, norm, eps, xn, down, inject, up, lo, coeff, x, q, meta, turns,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PENDING: tl.constexpr,
    BIAS: tl.constexpr, INJECT: tl.constexpr, NORM: tl.constexpr, DOWN: tl.constexpr,
    UP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
    COLS: tl.constexpr, LO_RUNS: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """NORM (0 or T * C), DOWN and UP: programs of each kind, in this order."""
    N: tl.constexpr = C * D
    normed, ranked, gone = turns, turns + _LINE, turns + 2 * _LINE
    p = tl.program_id(0)
    if p < NORM:
        norm_stream(
            residual, out, out_coeff, bias, out, out_coeff, norm, xn, q, meta, eps, p // C, p % C,
            D, C, BLOCK, PENDING, BIAS, False, True, SLOTS, False,
        )  # fmt: skip
        arrive(normed)
    elif p < NORM + DOWN:
        first = (p - NORM) * ROWS
        row = first + tl.arange(0, ROWS)
        if INJECT:
            if first >= R:
                w_row = tl.minimum(row - R, C - 1)
                _down_after(inject, w_row, row, xn, lo, coeff, normed, NORM, T, N, R, C, ROWS, RUNS)
            else:
                _down_after(down, row, row, xn, lo, coeff, normed, NORM, T, N, R, C, ROWS, RUNS)
        else:
            _down_after(down, row, row, xn, lo, coeff, normed, NORM, T, N, R, C, ROWS, RUNS)
        arrive(ranked)
    else:
        column = p - NORM - DOWN
        dtype: tl.constexpr = up.dtype.element_ty
        steps = load_runs_now(up, up_rows(column, D, C, COLS), R, LO_RUNS)
        before = wait_last(ranked, DOWN, gone)
        if T == 1:
            up_token(
                steps, dtype, token_runs(lo, R, LO_RUNS), column, 0, xn, x, q, meta, D, R, C,
                COLS, LO_RUNS, SLOTS, QUANTIZE,
            )  # fmt: skip
        else:
            for t in range(T):
                up_token(
                    words_again(steps, t), dtype, token_runs(lo + t * R, R, LO_RUNS), column, t,
                    xn, x, q, meta, D, R, C, COLS, LO_RUNS, SLOTS, QUANTIZE,
                )  # fmt: skip
        set_back(before, UP, normed, ranked, gone)


def new_turns(device: torch.device) -> torch.Tensor:
    """Counters of a launch, int32, zeros before and after it."""
    return torch.zeros(3 * _LINE.value, dtype=torch.int32, device=device)


def can_read(weights: StreamWeights) -> bool:
    """Whether there is a launch for these matrices."""
    every = [w for w in (weights.down, weights.inject, weights.up) if w is not None]
    plain = all(not w.is_tiles and w.scale == 1.0 for w in every)
    return plain and weights.down.n_rows % 8 == 0


def read(
    weights: StreamWeights,
    residual_TCD: torch.Tensor | None,
    pending: Pending | None,
    xn_TN: torch.Tensor,
    lo_TR: torch.Tensor,
    coeff_TC: torch.Tensor | None,
    x_TD: torch.Tensor,
    quantized: Quantized | None,
    turns: torch.Tensor,
    tuning: ReadTuning = NARROW,
) -> None:
    """The block's input x f32 [T, D], its int8 form and the write coefficients. One launch.

    The same as ``add_norm``, ``down`` and ``up_mix`` one after the other, with their shapes and
    bits. residual None: xn is there already. coeff None: without inject. turns: of ``new_turns``,
    not used by another stream meanwhile.
    """
    w, inject = weights, weights.inject if coeff_TC is not None else None
    (n_tokens, width), rank, wide = x_TD.shape, weights.down.n_rows, xn_TN.shape[1]
    streams = wide // width
    check_mix(wide, streams, quantized)
    assert coeff_TC is None or inject is not None, "coefficients come from inject"
    assert rank % 8 == 0 and wide % 8 == 0, f"rank {rank}, width {wide}"
    bias = pending.bias_D if pending else None
    n_norm = 0 if residual_TCD is None else n_tokens * streams
    n_down = triton.cdiv(rank + (0 if inject is None else streams), tuning.rows)
    n_up = triton.cdiv(width, tuning.cols)
    streams_or_xn = xn_TN if residual_TCD is None else residual_TCD
    out = xn_TN if pending is None else pending.out_TD
    out_coeff = None if pending is None else pending.coeff_TC
    read_kernel[(n_norm + n_down + n_up,)](
        streams_or_xn, out, out if out_coeff is None else out_coeff,
        out if bias is None else bias, w.norm, w.eps, xn_TN, float_rows(w.down),
        float_rows(inject or w.down), float_rows(w.up), lo_TR,
        lo_TR if coeff_TC is None else coeff_TC, x_TD, *quantized_args(quantized, x_TD), turns,
        T=n_tokens, D=width, R=rank, C=streams, PENDING=pending is not None,
        BIAS=bias is not None, INJECT=inject is not None, NORM=n_norm, DOWN=n_down, UP=n_up,
        BLOCK=triton.next_power_of_2(width), ROWS=tuning.rows, RUNS=DOWN_RUNS, COLS=tuning.cols,
        LO_RUNS=UP_RUNS, SLOTS=quantized_slots(quantized), QUANTIZE=quantized is not None,
        num_warps=tuning.warps, maxnreg=128, **EXACT,
    )  # fmt: skip
