# mypy: allow-untyped-defs, allow-untyped-decorators
"""A Gated DeltaNet layer between its projections, in one launch: convolution, l2 norm, gates, delta
rule over T tokens, gated norm, int8 result. The same kernel replays a part of a window.

Letters as in the package docstring. Program (j, p) owns columns of value head j and holds their
state M [K, V / parts] in registers while it walks over the tokens, one at a time, so every T has
the same bits; the next token's inputs are loaded meanwhile. The programs of one key head repeat its
convolution; one of them stores its columns. The gated norm needs all columns of a head: the last
program of a head to finish does it, found by a counter that it sets back to 0.

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
from strata.kernels.triton_common import EXACT, INTERPRET, interpreted_int

_L2_EPS = tl.constexpr(L2_EPS)
_SPREAD = (16, 1)
"""Value columns of a program (at most all) and its warps."""


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
    """What outlives a window: ring f32 [entries, N], state f32 [2, J, K, V], which int32 [1].

    done: int32 [J], zeros between launches, not shared by streams that run at the same time. With
    it the last program of a head makes its gated norm; None: a second launch does.
    """

    ring: torch.Tensor
    state: torch.Tensor
    which: torch.Tensor
    done: torch.Tensor | None = None


@triton.jit
def _column(columns, ring, p, start, limit, channel, STRIDE, N: tl.constexpr, E: tl.constexpr):
    """The column of position p: zeros before 0, in the ring below limit, then in the window."""
    in_ring = (p >= 0) & (p < limit) & (channel >= 0)
    in_window = (p >= limit) & (channel >= 0)
    x = tl.load(ring + ((p + E) % E) * N + channel, mask=in_ring, other=0.0)
    return x + tl.load(columns + (p - start) * STRIDE + channel, mask=in_window, other=0.0)


@triton.jit
def _before(
    columns, ring, start, limit, channel, STRIDE, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr
):
    """The P - 1 columns before the window, oldest first, and its first one."""
    past = ()
    for i in tl.static_range(P):
        past = past + (
            _column(columns, ring, start - (P - 1) + i, start, limit, channel, STRIDE, N, E),
        )  # fmt: skip
    return past


@triton.jit
def _taps(taps, channel, N: tl.constexpr, P: tl.constexpr):
    """The taps of some channels, oldest first."""
    w = ()
    for i in tl.static_range(P):
        w = w + (tl.load(taps + i * N + channel),)
    return w


@triton.jit
def _convolved(past, w):
    """silu of the causal convolution whose last column is the last of ``past``."""
    y = past[0] * w[0]
    for i in tl.static_range(1, len(w)):
        y = y + past[i] * w[i]
    return silu(y)


@triton.jit
def _keep_column(ring, x, p, channel, ok, N: tl.constexpr, E: tl.constexpr):
    """The window's column x of position p into the ring."""
    tl.store(ring + (p % E) * N + channel, x, mask=ok & (channel >= 0))


@triton.jit
def _step(m, q, k, v, keep, beta):
    """One token of the delta rule: (M after it, o)."""
    stored = tl.sum(m * k[:, None], axis=0)
    read = tl.sum(m * q[:, None], axis=0)
    u = beta * (v - keep * stored)
    o = keep * read + tl.sum(q * k, axis=0) * u
    return keep * m + k[:, None] * u[None, :], o


@triton.jit
def _norm_rows(
    z, norm, out, out_q, out_meta, eps, j, t0, n, Z_STRIDE, J: tl.constexpr, V: tl.constexpr,
    SILU: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Gated norm in place of head j of tokens t0 .. t0 + 7, of those below n; also as int8."""
    t = t0 + tl.arange(0, 8)[:, None]
    i_v = tl.arange(0, V)[None, :]
    ok = (t < n) & (i_v >= 0)
    # around the nearest cache: other programs wrote it
    o = tl.load(out + t * (J * V) + j * V + i_v, mask=ok, other=0.0, cache_modifier=".cg")
    tl.debug_barrier()  # all is read before any is written
    gate = tl.load(z + t * Z_STRIDE + j * V + i_v, mask=ok, other=0.0)
    root = tl.sqrt_rn(tl.sum(o * o, axis=1) / V + eps)
    y = o * tl.div_rn(tl.full((8,), 1.0, tl.float32), root)[:, None] * tl.load(norm + i_v)
    y = y * (silu(gate) if SILU else sigmoid(gate))
    tl.store(out + t * (J * V) + j * V + i_v, y, mask=ok)
    if QUANTIZE:
        BLOCKS: tl.constexpr = V // 32
        block = tl.arange(0, 8 * BLOCKS)
        row = t0 + block // BLOCKS
        store_blocks(
            tl.reshape(y, (8 * BLOCKS, 32)), j * BLOCKS + block % BLOCKS, row < n, out_q, out_meta,
            J * BLOCKS, 8 * BLOCKS, row * SLOTS,
        )  # fmt: skip


@triton.jit
def _norm_head(
    z, norm, out, out_q, out_meta, eps, j, n, Z_STRIDE, J: tl.constexpr, V: tl.constexpr,
    SILU: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """``_norm_rows`` of all n tokens, eight at a time however many there are."""
    for t0 in range(0, interpreted_int(n) if INTERPRET else n, 8):
        _norm_rows(
            z, norm, out, out_q, out_meta, eps, j, t0, n, Z_STRIDE, J, V, SILU, SLOTS, QUANTIZE
        )


@triton.jit(do_not_specialize=["full"], do_not_specialize_on_alignment=["n_tokens"])
def gdn_kernel(
    columns, z, a, b, n_tokens, full, pos, ring, state, which, done, taps, decay, dt_bias, norm,
    out, out_q, out_meta, eps, COLUMN_STRIDE, Z_STRIDE, A_STRIDE,
    H: tl.constexpr, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VC: tl.constexpr,
    P: tl.constexpr, E: tl.constexpr, GROUPED: tl.constexpr, SILU: tl.constexpr,
    SLOTS: tl.constexpr, QUANTIZE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """full 0: a window of n_tokens[0] tokens. full T: replay n of its T tokens, if 0 < n < T.

    One compiled kernel does both, so that a replay has the bits of a window of n tokens.
    """
    N: tl.constexpr = 2 * H * K + J * V
    j = tl.program_id(0)
    part = tl.program_id(1)
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
        i_v = part * VC + tl.arange(0, VC)
        at = i_k[:, None] * V + i_v[None, :]
        m = tl.load(state + (front * J + j).to(tl.int64) * K * V + at)
        decay_j = tl.load(decay + j)
        bias_j = tl.load(dt_bias + j)
        c_q = h * K + i_k
        c_k = c_q + H * K
        c_v = 2 * H * K + j * V + i_v
        w_q = _taps(taps, c_q, N, P)
        w_k = _taps(taps, c_k, N, P)
        w_v = _taps(taps, c_v, N, P)
        past_q = _before(columns, ring, start, limit, c_q, COLUMN_STRIDE, N, E, P)
        past_k = _before(columns, ring, start, limit, c_k, COLUMN_STRIDE, N, E, P)
        past_v = _before(columns, ring, start, limit, c_v, COLUMN_STRIDE, N, E, P)
        a_t = tl.load(a + j)
        b_t = tl.load(b + j)
        for t in range(0, interpreted_int(n) if INTERPRET else n):
            p = start + t
            # the next token's columns and gates are on their way while this one is computed
            last = tl.where(t + 1 < n, p + 1, p)
            next_q = _column(columns, ring, last, start, limit, c_q, COLUMN_STRIDE, N, E)
            next_k = _column(columns, ring, last, start, limit, c_k, COLUMN_STRIDE, N, E)
            next_v = _column(columns, ring, last, start, limit, c_v, COLUMN_STRIDE, N, E)
            next_a = tl.load(a + (last - start) * A_STRIDE + j)
            next_b = tl.load(b + (last - start) * A_STRIDE + j)
            q = _convolved(past_q, w_q)
            k = _convolved(past_k, w_k)
            v = _convolved(past_v, w_v)
            keeps = window & stores_keys & (part == 0)
            _keep_column(ring, past_q[P - 1], p, c_q, keeps, N, E)
            _keep_column(ring, past_k[P - 1], p, c_k, keeps, N, E)
            _keep_column(ring, past_v[P - 1], p, c_v, window, N, E)
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _L2_EPS) / tl.sqrt(K * 1.0))
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _L2_EPS)
            keep = tl.exp(decay_j * softplus(a_t + bias_j))
            m, o = _step(m, q, k, v, keep, sigmoid(b_t))
            tl.store(out + t * (J * V) + j * V + i_v, o, mask=(i_v >= 0) & window)
            past_q = past_q[1:] + (next_q,)
            past_k = past_k[1:] + (next_k,)
            past_v = past_v[1:] + (next_v,)
            a_t, b_t = next_a, next_b
        tl.store(state + ((1 - front) * J + j).to(tl.int64) * K * V + at, m)
        if COUNTED:
            # o of all threads is out before this program counts itself; the last one norms
            tl.debug_barrier()
            if window:  # noqa: SIM102
                if tl.atomic_add(done + j, 1, sem="acq_rel") == V // VC - 1:
                    tl.store(done + j, 0)
                    _norm_head(
                        z, norm, out, out_q, out_meta, eps, j, n, Z_STRIDE, J, V, SILU, SLOTS,
                        QUANTIZE,
                    )  # fmt: skip


@triton.jit
def norm_kernel(
    z, n_tokens, norm, out, out_q, out_meta, eps, Z_STRIDE,
    J: tl.constexpr, V: tl.constexpr, SILU: tl.constexpr, SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program j: the gated norm of its head, where there are no counters."""
    j = tl.program_id(0)
    n = tl.load(n_tokens)
    _norm_head(z, norm, out, out_q, out_meta, eps, j, n, Z_STRIDE, J, V, SILU, SLOTS, QUANTIZE)


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
    spread: tuple[int, int] | None = None,
) -> None:
    """All of a layer between its projections for one window. One launch (two without ``done``).

    columns_TN: f32 [T, N] = [q | k | v] before the convolution; z_TN: f32 [T, J * V]; a_TJ, b_TJ:
    f32 [T, J] of equal row stride, kept until commit. Rows are contiguous, their strides are free.
    n_tokens: int32 [1] on the device, T. pos_T: int32, pos_T[0] the window's first position.
    out_TN: f32 [T, J * V], the gated norm's result; quantized: the same as int8. full: see
    ``replay``. spread: columns and warps of a program, instead of the rule.
    """
    shape = state.state.shape
    n_heads, k_dim, v_dim = shape[1], shape[2], shape[3]
    for width in (k_dim, v_dim):
        assert width >= 16 and width & (width - 1) == 0, f"a head dim of {width}"
    assert quantized is None or v_dim % 32 == 0, f"{v_dim} is not whole blocks of 32"
    assert a_TJ.stride(0) == b_TJ.stride(0), "a and b have one row stride"
    cols, warps = spread or _SPREAD
    cols = min(cols, v_dim)
    counted = state.done is not None
    gdn_kernel[(n_heads, v_dim // cols)](
        columns_TN, z_TN, a_TJ, b_TJ, n_tokens, full, pos_T, state.ring, state.state, state.which,
        state.done if counted else state.which, weights.taps_PN, weights.decay_J,
        weights.dt_bias_J, weights.norm_V, out_TN, *quantized_args(quantized, out_TN), weights.eps,
        columns_TN.stride(0), z_TN.stride(0), a_TJ.stride(0),
        H=weights.n_k_heads, J=n_heads, K=k_dim, V=v_dim, VC=cols, P=weights.taps_PN.shape[0],
        E=state.ring.shape[0], GROUPED=weights.head_order == "grouped",
        SILU=weights.output_gate == "silu", SLOTS=quantized_slots(quantized),
        QUANTIZE=quantized is not None, COUNTED=counted, num_warps=warps, **EXACT,
    )  # fmt: skip
    if not counted and not full:
        norm_kernel[(n_heads,)](
            z_TN, n_tokens, weights.norm_V, out_TN, *quantized_args(quantized, out_TN),
            weights.eps, z_TN.stride(0), J=n_heads, V=v_dim, SILU=weights.output_gate == "silu",
            SLOTS=quantized_slots(quantized), QUANTIZE=quantized is not None, num_warps=1,
            **EXACT,
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
    flip_kernel[(1,)](n_accepted, which, num_warps=1, **EXACT)
