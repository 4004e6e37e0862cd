# mypy: allow-untyped-defs, allow-untyped-decorators
"""The n-gram block between its two products and the residual, in two launches.

    u[t, c] = gate(norm(key[t, c]), norm(R[t, c])) * value[t];   column = norm(u)        first
    R[t, c] += u + silu(causal convolution of the columns);      column into the ring    second

Sums are f32. A column before position 0 is zero; the second launch reads columns before the window
from the ring (models/ring: what it writes there is not among what it reads). A token's bits do not
depend on T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.pointwise.triton import sigmoid, silu
from strata.kernels.rms_norm.triton import inverse_rms
from strata.kernels.triton_common import EXACT

_FLOOR = tl.constexpr(1e-6)
_BLOCK = 1024
"""Channels of one program of the second launch."""


@dataclass(frozen=True)
class NgramWeights:
    """Small tensors of a block, f32 on the device: full norm weights [C * D], taps [P, C * D]."""

    norm_key: torch.Tensor
    norm_query: torch.Tensor
    norm_conv: torch.Tensor
    taps_PN: torch.Tensor
    dilation: int
    eps: float


@triton.jit
def gate_kernel(
    key, value, residual, w_key, w_query, w_conv, u, column, eps, KEY_STRIDE, VALUE_STRIDE,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t * C + c."""
    t = tl.program_id(0) // C
    c = tl.program_id(0) % C
    i = tl.arange(0, BLOCK)
    ok = i < D
    k = tl.load(key + t * KEY_STRIDE + c * D + i, mask=ok, other=0.0)
    q = tl.load(residual + (t * C + c) * D + i, mask=ok, other=0.0)
    k = k * inverse_rms(k, D, eps) * tl.load(w_key + c * D + i, mask=ok, other=0.0)
    q = q * inverse_rms(q, D, eps) * tl.load(w_query + c * D + i, mask=ok, other=0.0)
    s = tl.sum(k * q, axis=0) / tl.sqrt(D * 1.0)
    root = tl.sqrt(tl.maximum(tl.abs(s), _FLOOR))
    # a score of exactly 0 has sign 0, so its gate is a half
    gate = sigmoid(tl.where(s > 0, root, tl.where(s < 0, -root, s)))
    y = gate * tl.load(value + t * VALUE_STRIDE + i, mask=ok, other=0.0)
    at = (t * C + c) * D + i
    tl.store(u + at, y, mask=ok)
    y = y * inverse_rms(y, D, eps) * tl.load(w_conv + c * D + i, mask=ok, other=0.0)
    tl.store(column + at, y, mask=ok)


@triton.jit
def conv_kernel(
    u, column, ring, taps, pos, residual, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    DILATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p): BLOCK channels of token t."""
    t = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < N
    start = tl.load(pos)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(P):
        back = DILATION * (P - 1 - tap)
        at = t - back
        p = start + at
        x = tl.load(column + at * N + i, mask=ok & (at >= 0), other=0.0)
        in_ring = (at < 0) & (p >= 0)
        x += tl.load(ring + ((p + E) % E) * N + i, mask=ok & in_ring, other=0.0)
        total += x * tl.load(taps + tap * N + i, mask=ok, other=0.0)
    y = tl.load(u + t * N + i, mask=ok, other=0.0) + silu(total)
    r = tl.load(residual + t * N + i, mask=ok, other=0.0)
    tl.store(residual + t * N + i, r + y, mask=ok)
    own = tl.load(column + t * N + i, mask=ok, other=0.0)
    tl.store(ring + ((start + t) % E) * N + i, own, mask=ok)


def ngram(
    key_TN: torch.Tensor,
    value_TD: torch.Tensor,
    residual_TCD: torch.Tensor,
    ring_EN: torch.Tensor,
    pos_T: torch.Tensor,
    weights: NgramWeights,
    scratch_2TN: torch.Tensor,
) -> None:
    """Add the block to the residual (in place) and its columns to the ring. Two launches.

    key_TN: f32 [T, C * D] and value_TD: f32 [T, D], products of the gathered rows; rows contiguous,
    strides free. residual_TCD: f32, contiguous, nothing pending. ring_EN: f32 [entries, C * D].
    pos_T: int32, pos_T[0] the window's first position. scratch_2TN: f32 [2, >= T, C * D].
    """
    n_tokens, streams, width = residual_TCD.shape
    n_taps, wide = weights.taps_PN.shape
    assert len(ring_EN) >= weights.dilation * (n_taps - 1) + n_tokens, "the ring is too short"
    u, column = scratch_2TN[0], scratch_2TN[1]
    block = triton.next_power_of_2(width)
    gate_kernel[(n_tokens * streams,)](
        key_TN, value_TD, residual_TCD, weights.norm_key, weights.norm_query, weights.norm_conv,
        u, column, weights.eps, key_TN.stride(0), value_TD.stride(0), D=width, C=streams,
        BLOCK=block, num_warps=min(16, max(1, block // 256)), **EXACT,
    )  # fmt: skip
    conv_kernel[(n_tokens, triton.cdiv(wide, _BLOCK))](
        u, column, ring_EN, weights.taps_PN, pos_T, residual_TCD, N=wide, E=len(ring_EN),
        P=n_taps, DILATION=weights.dilation, BLOCK=_BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
