# mypy: allow-untyped-defs, allow-untyped-decorators
"""A Gated DeltaNet layer between its projections, in one launch: convolution, l2 norm, gates, delta
rule over T tokens, gated norm, int8 result. The same kernel replays a part of a window.

Letters as in the package docstring. Program j owns value head j and holds its state M [K, V] in
registers while it walks over the tokens, one at a time, so every T has the same bits. The value
heads of one key head repeat its convolution; one of them stores its columns.

State: ``ring`` f32 [ring entries, N], the columns before the convolution by position (models/ring:
what a window writes is never among what it reads), and ``state`` f32 [2, J, K, V], of which
``which`` (int32 [1], device) says the committed one. A window leaves the state after its last token
in the other one; ``replay`` overwrites that with the state after n < T of them, from the ring and
the kept a and b; ``flip`` commits. Per token, with S = M^T q, U = M^T k:
    u = beta (v - keep U);   o = keep S + <q, k> u;   M = keep M + k u^T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from strata.kernels.gdn.ref import L2_EPS
from strata.kernels.pointwise.triton import (
    quantized_args,
    quantized_slots,
    sigmoid,
    silu,
    softplus,
)
from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import store_blocks
from strata.kernels.rms_norm.triton import inverse_rms
from strata.kernels.triton_common import EXACT, INTERPRET, interpreted_int

_L2_EPS = tl.constexpr(L2_EPS)


@dataclass(frozen=True)
class GdnWeights:
    """Small tensors of one layer, f32 on the device, and its shape.

    taps_PN [P, N] (contiguous), decay_J, dt_bias_J, norm_V. n_k_heads H, k_dim K, v_dim V: powers
    of two, at least 16. head_order, output_gate: as in models' GdnSpec.
    """

    taps_PN: torch.Tensor
    decay_J: torch.Tensor
    dt_bias_J: torch.Tensor
    norm_V: torch.Tensor
    eps: float
    n_k_heads: int
    k_dim: int
    head_order: Literal["grouped", "interleaved"]
    output_gate: Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class GdnState:
    """What outlives a window: ring f32 [entries, N], state f32 [2, J, K, V], which int32 [1]."""

    ring: torch.Tensor
    state: torch.Tensor
    which: torch.Tensor


@triton.jit
def _convolved(
    columns, ring, taps, p, start, limit, channel, STRIDE,
    N: tl.constexpr, E: tl.constexpr, P: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """silu of the causal convolution at position p.

    Columns are zeros before position 0, in the ring below limit, and then in the window. TAPS: P
    rounded up so that a tile of them has the layout of the state (4 numbers a thread).
    """
    tap = tl.arange(0, TAPS)[:, None]
    at = p - (P - 1) + tap
    # a tile of all taps: more numbers than threads, so they are loaded once and not by every user
    in_ring = (at >= 0) & (at < limit) & (tap < P)
    in_window = (at >= limit) & (tap < P)
    channel = channel[None, :]
    x = tl.load(ring + ((at + E) % E) * N + channel, mask=in_ring & (channel >= 0), other=0.0)
    x += tl.load(
        columns + (at - start) * STRIDE + channel, mask=in_window & (channel >= 0), other=0.0
    )
    w = tl.load(taps + tap * N + channel, mask=(tap < P) & (channel >= 0), other=0.0)
    return silu(tl.sum(x * w, axis=0))


@triton.jit
def _keep_column(columns, ring, p, start, channel, ok, STRIDE, N: tl.constexpr, E: tl.constexpr):
    """The window's column of position p into the ring."""
    ok = ok & (channel >= 0)
    x = tl.load(columns + (p - start) * STRIDE + channel, mask=ok, other=0.0)
    tl.store(ring + (p % E) * N + channel, x, mask=ok)


@triton.jit
def _step(m, q, k, v, keep, beta):
    """One token of the delta rule: (M after it, o)."""
    stored = tl.sum(m * k[:, None], axis=0)
    read = tl.sum(m * q[:, None], axis=0)
    u = beta * (v - keep * stored)
    o = keep * read + tl.sum(q * k, axis=0) * u
    return keep * m + k[:, None] * u[None, :], o


@triton.jit(do_not_specialize=["full"], do_not_specialize_on_alignment=["n_tokens"])
def gdn_kernel(
    columns, z, a, b, n_tokens, full, pos, ring, state, which, taps, decay, dt_bias, norm,
    out, out_q, out_meta, eps, COLUMN_STRIDE, Z_STRIDE, A_STRIDE,
    H: tl.constexpr, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    TAPS: tl.constexpr, E: tl.constexpr, GROUPED: tl.constexpr, SILU: tl.constexpr,
    SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """full 0: a window of n_tokens[0] tokens. full T: replay n of its T tokens, if 0 < n < T.

    One compiled kernel does both, so that a replay has the bits of a window of n tokens.
    """
    N: tl.constexpr = 2 * H * K + J * V
    j = tl.program_id(0)
    h = j // (J // H) if GROUPED else j % H
    stores_keys = (j % (J // H) == 0) if GROUPED else (j < H)
    n = tl.load(n_tokens)
    n = tl.where(n == full, 0, n)
    window = full == 0
    if n > 0:
        start = tl.load(pos)
        # a replay finds all columns in the ring
        limit = tl.where(window, start, start + full)
        front = tl.load(which)
        i_k = tl.arange(0, K)
        i_v = tl.arange(0, V)
        at = i_k[:, None] * V + i_v[None, :]
        m = tl.load(state + (front * J + j).to(tl.int64) * K * V + at)
        weight = tl.load(norm + i_v)
        decay_j = tl.load(decay + j)
        bias_j = tl.load(dt_bias + j)
        c_q = h * K + i_k
        c_k = c_q + H * K
        c_v = 2 * H * K + j * V + i_v
        for t in range(0, interpreted_int(n) if INTERPRET else n):
            p = start + t
            q = _convolved(columns, ring, taps, p, start, limit, c_q, COLUMN_STRIDE, N, E, P, TAPS)
            k = _convolved(columns, ring, taps, p, start, limit, c_k, COLUMN_STRIDE, N, E, P, TAPS)
            v = _convolved(columns, ring, taps, p, start, limit, c_v, COLUMN_STRIDE, N, E, P, TAPS)
            _keep_column(columns, ring, p, start, c_q, window & stores_keys, COLUMN_STRIDE, N, E)
            _keep_column(columns, ring, p, start, c_k, window & stores_keys, COLUMN_STRIDE, N, E)
            _keep_column(columns, ring, p, start, c_v, window, COLUMN_STRIDE, N, E)
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _L2_EPS) / tl.sqrt(K * 1.0))
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _L2_EPS)
            keep = tl.exp(decay_j * softplus(tl.load(a + t * A_STRIDE + j) + bias_j))
            beta = sigmoid(tl.load(b + t * A_STRIDE + j))
            m, o = _step(m, q, k, v, keep, beta)
            gate = tl.load(z + t * Z_STRIDE + j * V + i_v)
            y = o * inverse_rms(o, V, eps) * weight
            y = y * (silu(gate) if SILU else sigmoid(gate))
            tl.store(out + t * (J * V) + j * V + i_v, y, mask=(i_v >= 0) & window)
            if QUANTIZE:
                blocks: tl.constexpr = V // 32
                block = tl.arange(0, blocks)
                store_blocks(
                    tl.reshape(y, (blocks, 32)), j * blocks + block, (block >= 0) & window,
                    out_q + t * SLOTS * 32, out_meta + t * SLOTS * 2, J * blocks, blocks,
                )  # fmt: skip
        tl.store(state + ((1 - front) * J + j).to(tl.int64) * K * V + at, m)


def window(
    columns_TN: torch.Tensor,
    z_TN: torch.Tensor,
    a_TJ: torch.Tensor,
    b_TJ: torch.Tensor,
    n_tokens: torch.Tensor,
    pos_T: torch.Tensor,
    state: GdnState,
    weights: GdnWeights,
    out_TN: torch.Tensor,
    quantized: Quantized | None = None,
    *,
    full: int = 0,
) -> None:
    """All of a layer between its projections for one window. One launch.

    columns_TN: f32 [T, N] = [q | k | v] before the convolution; z_TN: f32 [T, J * V]; a_TJ, b_TJ:
    f32 [T, J] of equal row stride, kept until commit. Rows are contiguous, their strides are free.
    n_tokens: int32 [1] on the device, T. pos_T: int32, pos_T[0] the window's first position.
    out_TN: f32 [T, J * V], the gated norm's result; quantized: the same as int8. full: see
    ``replay``.
    """
    shape = state.state.shape
    n_heads, k_dim, v_dim = shape[1], shape[2], shape[3]
    for width in (k_dim, v_dim):
        assert width >= 16 and width & (width - 1) == 0, f"a head dim of {width}"
    assert quantized is None or v_dim % 32 == 0, f"{v_dim} is not whole blocks of 32"
    assert a_TJ.stride(0) == b_TJ.stride(0), "a and b have one row stride"
    n_taps = weights.taps_PN.shape[0]
    warps = 8 if k_dim * v_dim >= 128 * 64 else 2
    gdn_kernel[(n_heads,)](
        columns_TN, z_TN, a_TJ, b_TJ, n_tokens, full, pos_T, state.ring, state.state, state.which,
        weights.taps_PN, weights.decay_J, weights.dt_bias_J, weights.norm_V,
        out_TN, *quantized_args(quantized, out_TN), weights.eps,
        columns_TN.stride(0), z_TN.stride(0), a_TJ.stride(0),
        H=weights.n_k_heads, J=n_heads, K=k_dim, V=v_dim, P=n_taps,
        TAPS=max(triton.next_power_of_2(n_taps), 32 * warps * 4 // v_dim),
        E=state.ring.shape[0], GROUPED=weights.head_order == "grouped",
        SILU=weights.output_gate == "silu", SLOTS=quantized_slots(quantized),
        QUANTIZE=quantized is not None, num_warps=warps, **EXACT,
    )  # fmt: skip


def replay(
    columns_TN: torch.Tensor,
    z_TN: torch.Tensor,
    a_TJ: torch.Tensor,
    b_TJ: torch.Tensor,
    n_accepted: torch.Tensor,
    pos_T: torch.Tensor,
    state: GdnState,
    weights: GdnWeights,
    out_TN: torch.Tensor,
    quantized: Quantized | None = None,
) -> None:
    """Leave the state after the first n of the window's T tokens beside the committed one.

    The arguments of ``window`` again (a and b still hold that window's values; columns, z, out and
    quantized are neither read nor written, but keep the kernel the same), and n_accepted: int32 [1]
    on the device. Nothing happens for n = 0 and n = T. One launch.
    """
    window(
        columns_TN, z_TN, a_TJ, b_TJ, n_accepted, pos_T, state, weights, out_TN, quantized,
        full=len(columns_TN),
    )  # fmt: skip


@triton.jit
def flip_kernel(n_accepted, which):
    """which = 1 - which when tokens were accepted."""
    front = tl.load(which)
    tl.store(which, tl.where(tl.load(n_accepted) > 0, 1 - front, front))


def flip(n_accepted: torch.Tensor, which: torch.Tensor) -> None:
    """Commit: after the replays of all layers that share ``which``. One launch."""
    flip_kernel[(1,)](n_accepted, which, num_warps=1)
