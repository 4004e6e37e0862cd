# mypy: allow-untyped-defs, allow-untyped-decorators
"""The READ of hyper-connections for one token in one launch, for float matrices.

    first C programs   write what is pending, norm one stream    (rms_norm.triton)
    then               _ROWS rows of [down; inject] each, which wait for those
    then               _COLS columns of up and the mix each, which wait for all of down's

A program asks for its weights before it waits, so all bytes of a READ are on their way while the
norm is made. The device functions, and the layouts that order their sums, are those of the single
launches, so the bits are too (hyper.triton). At four tokens three launches are the faster form.
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
from strata.kernels.rms_norm.triton import Pending, norm_stream, norm_warps
from strata.kernels.triton_common import EXACT
from strata.kernels.triton_floats import load_runs_now, token_runs
from strata.kernels.triton_turns import arrive, set_back, wait_for, wait_last

_LINE = tl.constexpr(32)
"""int32 numbers of a cache line: each counter has one of its own."""


_ROWS, _COLS, _WARPS = 4, 64, 16
"""125 programs at the flagship's sizes, one a multiprocessor."""


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
    w, w_row, row, xn, lo, coeff, normed, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    steps = load_runs_now(w, w_row[:, None], N, RUNS)
    wait_for(normed, C)
    down_product(steps, w.dtype.element_ty, row, xn, lo, coeff, 1, N, R, C, ROWS, RUNS)


@triton.jit
def read_kernel(
    residual, out, out_coeff, bias, norm, eps, xn, down, inject, up, lo, coeff, x, q, meta, turns,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PENDING: tl.constexpr, BIAS: tl.constexpr,
    INJECT: tl.constexpr, DOWN: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, RUNS: tl.constexpr, COLS: tl.constexpr, LO_RUNS: tl.constexpr,
    SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """C programs for the norm, DOWN for rows of [down; inject], UP for columns, in this order."""
    N: tl.constexpr = C * D
    normed, ranked, gone = turns, turns + _LINE, turns + 2 * _LINE
    p = tl.program_id(0)
    if p < C:
        norm_stream(
            residual, out, out_coeff, bias, out, out_coeff, norm, xn, q, meta, eps, 0, p,
            D, C, BLOCK, PENDING, BIAS, False, True, SLOTS, False,
        )  # fmt: skip
        arrive(normed)
    elif p < C + DOWN:
        first = (p - C) * ROWS
        row = first + tl.arange(0, ROWS)
        if INJECT:
            if first >= R:
                w_row = tl.minimum(row - R, C - 1)
                _down_after(inject, w_row, row, xn, lo, coeff, normed, N, R, C, ROWS, RUNS)
            else:
                _down_after(down, row, row, xn, lo, coeff, normed, N, R, C, ROWS, RUNS)
        else:
            _down_after(down, row, row, xn, lo, coeff, normed, N, R, C, ROWS, RUNS)
        arrive(ranked)
    else:
        column = p - C - DOWN
        steps = load_runs_now(up, up_rows(column, D, C, COLS), R, LO_RUNS)
        before = wait_last(ranked, DOWN, gone)
        up_token(
            steps, up.dtype.element_ty, token_runs(lo, R, LO_RUNS), column, 0, xn, x, q, meta,
            D, R, C, COLS, LO_RUNS, SLOTS, QUANTIZE,
        )  # fmt: skip
        set_back(before, UP, normed, ranked, gone)


def new_turns(device: torch.device) -> torch.Tensor:
    """Counters of a launch, int32, zeros before and after it."""
    return torch.zeros(3 * _LINE.value, dtype=torch.int32, device=device)


def is_plain(weights: StreamWeights) -> bool:
    """Whether float kernels can multiply these matrices."""
    every = [w for w in (weights.down, weights.inject, weights.up) if w is not None]
    return all(not w.is_tiles and w.scale == 1.0 for w in every) and weights.down.n_rows % 8 == 0


def is_wide(width: int) -> bool:
    """Whether ``add_norm`` sums streams of that width in the order of this launch."""
    return norm_warps(width) == _WARPS


def read(
    weights: StreamWeights,
    residual_1CD: torch.Tensor,
    pending: Pending | None,
    xn_1N: torch.Tensor,
    lo_1R: torch.Tensor,
    coeff_1C: torch.Tensor | None,
    x_1D: torch.Tensor,
    quantized: Quantized | None,
    turns: torch.Tensor,
) -> None:
    """The block's input x f32 [1, D], its int8 form and the write coefficients. One launch.

    The same as ``add_norm``, ``down`` and ``up_mix`` one after the other, with their shapes and
    (where ``is_wide``) bits. coeff None: without inject. turns: of ``new_turns``, not used by
    another stream meanwhile.
    """
    w, inject = weights, weights.inject if coeff_1C is not None else None
    n_tokens, streams, width = residual_1CD.shape
    rank = w.down.n_rows
    assert n_tokens == 1, f"{n_tokens} tokens take three launches"
    assert coeff_1C is None or inject is not None, "coefficients come from inject"
    assert rank % 8 == 0 and width % 8 == 0, f"rank {rank}, width {width}"
    check_mix(streams * width, streams, quantized)
    bias = pending.bias_D if pending else None
    n_down = triton.cdiv(rank + (0 if inject is None else streams), _ROWS)
    n_up = triton.cdiv(width, _COLS)
    out = residual_1CD if pending is None else pending.out_TD
    out_coeff = None if pending is None else pending.coeff_TC
    read_kernel[(streams + n_down + n_up,)](
        residual_1CD, out, out if out_coeff is None else out_coeff, out if bias is None else bias,
        w.norm, w.eps, xn_1N, float_rows(w.down), float_rows(inject or w.down), float_rows(w.up),
        lo_1R, lo_1R if coeff_1C is None else coeff_1C, x_1D, *quantized_args(quantized, x_1D),
        turns, D=width, R=rank, C=streams, PENDING=pending is not None, BIAS=bias is not None,
        INJECT=inject is not None, DOWN=n_down, UP=n_up, BLOCK=triton.next_power_of_2(width),
        ROWS=_ROWS, RUNS=DOWN_RUNS, COLS=_COLS, LO_RUNS=UP_RUNS, SLOTS=quantized_slots(quantized),
        QUANTIZE=quantized is not None, num_warps=_WARPS, maxnreg=128, **EXACT,
    )  # fmt: skip
