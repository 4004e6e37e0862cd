# mypy: allow-untyped-defs, allow-untyped-decorators
"""Residual writes and the norm that follows them, in one launch: plain and hyper-connected.

    R[t, c] += coeff[t, c] * (out[t] + bias)     the write that the block before left pending
    R[t, c] += late_coeff[t, c] * late[t]        a deferred part of it
    x[t, c] = R[t, c] * (1 / sqrt(mean(R[t, c]^2) + eps)) * weight[c]

C = 1 is the plain residual (coefficients do not exist there). Sums are f32. A program owns one
stream of one token, so a token's bits do not depend on T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.pointwise.triton import quantized_args, quantized_slots
from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import store_blocks
from strata.kernels.triton_common import EXACT


@dataclass(frozen=True)
class Pending:
    """A block output that is not in the residual yet.

    out_TD: f32 [T, D], contiguous. coeff_TC: f32 [T, C], None for a plain residual. bias_D: f32
    [D], added to every row of out first (an output projection's bias).
    """

    out_TD: torch.Tensor
    coeff_TC: torch.Tensor | None = None
    bias_D: torch.Tensor | None = None


_OVERFLOWING = tl.constexpr(3e38)
"""Sums of squares from here on have no float32; they begin at numbers of about 1e17."""
_SHRINK = tl.constexpr(2.0**-80)


@triton.jit
def inverse_rms(x, N: tl.constexpr, eps):
    """1 / sqrt(mean square + eps) of a vector of N numbers (padding: zeros)."""
    total = tl.sum(x * x)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(total / N + eps))
    if total > _OVERFLOWING:  # else the result would be 0, and what follows finite and wrong
        small = x * _SHRINK
        inverse = tl.div_rn(_SHRINK, tl.sqrt_rn(tl.sum(small * small) / N))
    return inverse


@triton.jit
def _written(
    r, out, coeff, bias, t, c, i, ok, D: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr
):
    """r plus one pending output of token t, stream c."""
    y = tl.load(out + t * D + i, mask=ok, other=0.0)
    if BIAS:
        y += tl.load(bias + i, mask=ok, other=0.0)
    if C > 1:
        y = tl.load(coeff + t * C + c) * y
    return r + y


@triton.jit
def norm_stream(
    residual, out, coeff, bias, late, late_coeff, weight, x, q, meta, eps, t, c,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PENDING: tl.constexpr,
    BIAS: tl.constexpr, LATE: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Stream c of token t."""
    i = tl.arange(0, BLOCK)
    ok = i < D
    row = (t * C + c) * D + i
    r = tl.load(residual + row, mask=ok, other=0.0)
    if PENDING:
        r = _written(r, out, coeff, bias, t, c, i, ok, D, C, BIAS)
    if LATE:
        r = _written(r, late, late_coeff, late, t, c, i, ok, D, C, False)
    if PENDING or LATE:
        tl.store(residual + row, r, mask=ok)
    if NORM:
        y = r * inverse_rms(r, D, eps) * tl.load(weight + c * D + i, mask=ok, other=0.0)
        tl.store(x + row, y, mask=ok)
        if QUANTIZE:
            n: tl.constexpr = BLOCK // 32
            nb: tl.constexpr = C * D // 32
            block = tl.arange(0, n)
            store_blocks(
                tl.reshape(y, (n, 32)), c * (D // 32) + block, block < D // 32,
                q + t * SLOTS * 32, meta + t * SLOTS * 2, nb, n,
            )  # fmt: skip


@triton.jit
def add_norm_kernel(
    residual, out, coeff, bias, late, late_coeff, weight, x, q, meta, eps,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PENDING: tl.constexpr,
    BIAS: tl.constexpr, LATE: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program t * C + c."""
    norm_stream(
        residual, out, coeff, bias, late, late_coeff, weight, x, q, meta, eps,
        tl.program_id(0) // C, tl.program_id(0) % C, D, C, BLOCK, PENDING, BIAS, LATE, NORM,
        SLOTS, QUANTIZE,
    )  # fmt: skip


def norm_warps(width: int) -> int:
    """Warps a stream of that width; the order of its sum of squares follows from them."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))


def add_norm(
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    x: torch.Tensor | None,
    *,
    pending: Pending | None = None,
    late: Pending | None = None,
    quantized: Quantized | None = None,
) -> None:
    """Write what is pending into the residual (in place), then norm it into x. One launch.

    residual: f32 [T, D] or [T, C, D], contiguous. weight: [D] or [C * D], the full weight; x: like
    residual, or [T, C * D]. weight None (x None): only write. late: without bias. quantized: x as
    int8 rows of C * D columns; D is then a multiple of 32.
    """
    n_tokens, width = residual.shape[0], residual.shape[-1]
    streams = residual.numel() // (n_tokens * width)
    args = []
    for one in (pending, late):
        assert one is None or (one.coeff_TC is None) == (streams == 1), "coefficients per stream"
        args.append(residual if one is None else one.out_TD)
        args.append(residual if one is None or one.coeff_TC is None else one.coeff_TC)
    bias = pending.bias_D if pending else None
    assert late is None or late.bias_D is None, "a late part has no bias of its own"
    assert quantized is None or width % 32 == 0, f"{width} columns are not whole blocks of 32"
    block = triton.next_power_of_2(width)
    add_norm_kernel[(n_tokens * streams,)](
        residual, args[0], args[1], residual if bias is None else bias, args[2], args[3],
        residual if weight is None else weight, residual if x is None else x,
        *quantized_args(quantized, residual), eps, D=width, C=streams, BLOCK=block,
        PENDING=pending is not None, BIAS=bias is not None, LATE=late is not None,
        NORM=x is not None, SLOTS=quantized_slots(quantized), QUANTIZE=quantized is not None,
        num_warps=norm_warps(width), **EXACT,
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = norm of each row of x f32 [T, n] by itself, times weight [n]. One launch."""
    add_norm(x.view(-1, x.shape[-1]), weight, eps, out)
