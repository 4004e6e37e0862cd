# mypy: allow-untyped-defs, allow-untyped-decorators
"""sigmoid, silu and softplus as Triton device functions, and rows scaled by the sigmoid of a gate.

None overflows: exp is only taken of numbers <= 0 (softplus: <= 20).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import store_blocks
from strata.kernels.triton_common import EXACT

_BLOCKS = 8
"""Blocks of 32 a program."""


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + e^x), and x itself above 20."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(u) * e / (u - 1) is log1p(e) without the rounding of u (Higham 2002, 1.14.1)
    lost = u == 1.0
    y = tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, y)


@triton.jit
def scale_rows_kernel(
    y, gate, q, meta, K: tl.constexpr, GATE_STRIDE: tl.constexpr, SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (t, p): N blocks of 32 of token t, in place."""
    t = tl.program_id(0)
    block = tl.program_id(1) * N + tl.arange(0, N)
    k = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = k < K
    factor = sigmoid(tl.load(gate + t * GATE_STRIDE))
    scaled = factor * tl.load(y + t * K + k, mask=ok, other=0.0)
    tl.store(y + t * K + k, scaled, mask=ok)
    if QUANTIZE:
        nb: tl.constexpr = K // 32
        store_blocks(scaled, block, block < nb, q + t * SLOTS * 32, meta + t * SLOTS * 2, nb, N)


def scale_rows(
    y_TK: torch.Tensor, gate_T: torch.Tensor, quantized: Quantized | None = None
) -> None:
    """y[t] *= sigmoid(gate[t]), in place (the shared expert's gate). One launch.

    y_TK: f32 [T, K], contiguous. gate_T: f32 [T], any stride. quantized: takes the result as well.
    """
    n_tokens, width = y_TK.shape
    assert y_TK.is_contiguous() and y_TK.dtype == torch.float32, "y is f32 and contiguous"
    grid = (n_tokens, triton.cdiv(width, 32 * _BLOCKS))
    scale_rows_kernel[grid](
        y_TK, gate_T, *quantized_args(quantized, y_TK), K=width, GATE_STRIDE=gate_T.stride(0),
        SLOTS=quantized_slots(quantized), QUANTIZE=quantized is not None, N=_BLOCKS, num_warps=2,
        **EXACT,
    )  # fmt: skip


def quantized_args(
    quantized: Quantized | None, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pointers q and meta of an optional int8 output; ``other`` where there is none (unused)."""
    return (other, other) if quantized is None else (quantized.q, quantized.meta)


def quantized_slots(quantized: Quantized | None) -> int:
    """Slots of a row of an optional int8 output."""
    return 0 if quantized is None else quantized.q.shape[1]
