# mypy: allow-untyped-defs, allow-untyped-decorators
"""A Gated DeltaNet layer between its projections, in one launch: convolution, l2 norm, gates, delta
rule over T tokens, gated norm, int8 result. The same kernel replays a part of a window.

Letters as in the package docstring. Program j owns value head j: its state M [K, V] lies in
registers, each warp's in whole columns, so that the sums over K need no other warp. What does not
need M is made for eight tokens at once, a warp each, in a workspace; then the program walks over
the tokens, one at a time; then it norms the eight. So every T has the same bits. The programs of
one key head repeat its convolution; one of them stores its columns.

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
from strata.kernels.triton_common import EXACT, INTERPRET, fma, interpreted_int

_L2_EPS = tl.constexpr(L2_EPS)
_MOST_TOKENS = 16
"""Of a window: models/ring."""
_LANES, _COLUMNS = tl.constexpr(8), tl.constexpr(16)
"""A warp's part of M: rows side by side in its threads, and columns."""


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

    workspace: f32 [T or more, J, workspace_numbers(K, V)], shared by layers but not by streams that
    run at the same time.
    """

    ring: torch.Tensor
    state: torch.Tensor
    which: torch.Tensor
    workspace: torch.Tensor


def workspace_numbers(k_dim: int, v_dim: int) -> int:
    """What a token and value head leave in the workspace: q, k, v, keep, beta, <q, k>, a spare."""
    return 2 * k_dim + v_dim + 4


@triton.jit
def _columns(
    columns, ring, start, t, n, window, channel, STRIDE, N: tl.constexpr, E: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """The P columns that tokens t [T, 1] of those below n convolve, oldest first, each [T, C].

    Columns before the window come from the ring, its own too when it is replayed.
    """
    found = ()
    for i in tl.static_range(P):
        back = t - (P - 1) + i
        p = start + back
        row = tl.where(window & (back >= 0), columns + back * STRIDE, ring + ((p + E) % E) * N)
        found = found + (
            tl.load(row + channel, mask=(t < n) & (p >= 0) & (channel >= 0), other=0.0),
        )
    return found


@triton.jit
def _taps(taps, channel, N: tl.constexpr, P: tl.constexpr):
    """The taps of some channels, oldest first."""
    w = ()
    for i in tl.static_range(P):
        w = w + (tl.load(taps + i * N + channel),)
    return w


@triton.jit
def _convolved(past, w):
    """silu of the convolution of columns that end with a token's own."""
    y = past[0] * w[0]
    for i in tl.static_range(1, len(w)):
        y = y + past[i] * w[i]
    return silu(y)


@triton.jit
def _prepare(
    q, k, v, keep, beta, workspace, n, STRIDE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """q and k [ROWS, K] normed, v [ROWS, V], keep, beta [ROWS] and <q, k> into the workspace."""
    row = tl.arange(0, ROWS)
    i_k, i_v = tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    ok = row < n
    some = ok[:, None]
    q = q * (tl.rsqrt(tl.sum(q * q, axis=1) + _L2_EPS) / tl.sqrt(K * 1.0))[:, None]
    k = k * tl.rsqrt(tl.sum(k * k, axis=1) + _L2_EPS)[:, None]
    vectors = workspace + row[:, None] * STRIDE
    tl.store(vectors + i_k, q, mask=some & (i_k >= 0))
    tl.store(vectors + K + i_k, k, mask=some & (i_k >= 0))
    tl.store(vectors + 2 * K + i_v, v, mask=some & (i_v >= 0))
    scalars = workspace + row * STRIDE + 2 * K + V
    tl.store(scalars, keep, mask=ok)
    tl.store(scalars + 1, beta, mask=ok)
    tl.store(scalars + 2, tl.sum(q * k, axis=1), mask=ok)


@triton.jit
def _step(m, one, i_k, i_v, K: tl.constexpr, V: tl.constexpr):
    """One token of the delta rule on M [lanes, parts, rows, columns]: (M after it, o)."""
    q = tl.load(one + i_k)
    k = tl.load(one + K + i_k)
    v = tl.load(one + 2 * K + i_v)
    keep = tl.load(one + 2 * K + V)
    beta = tl.load(one + 2 * K + V + 1)
    qk = tl.load(one + 2 * K + V + 2)
    stored = tl.sum(tl.sum(m * k, axis=2), axis=0)
    read = tl.sum(tl.sum(m * q, axis=2), axis=0)
    u = beta * (v - keep * stored)
    o = keep * read + qk * u
    return fma(tl.broadcast_to(k, m.shape), u[None, :, None, :], keep * m), o


@triton.jit
def _norm_rows(
    gate, norm, out, out_q, out_meta, eps, j, n, window, J: tl.constexpr, V: tl.constexpr,
    SILU: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gated norm in place of head j of all tokens; also as int8."""
    t = tl.arange(0, ROWS)[:, None]
    i_v = tl.arange(0, V)[None, :]
    ok = (t < n) & window & (i_v >= 0)
    tl.debug_barrier()  # other warps made o
    o = tl.load(out + t * (J * V) + j * V + i_v, mask=ok, other=0.0, cache_modifier=".cg")
    tl.debug_barrier()  # all is read before any is written
    root = tl.sqrt_rn(tl.sum(o * o, axis=1) / V + eps)
    y = o * tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)[:, None] * norm
    y = y * (silu(gate) if SILU else sigmoid(gate))
    tl.store(out + t * (J * V) + j * V + i_v, y, mask=ok)
    if QUANTIZE:
        BLOCKS: tl.constexpr = V // 32
        ALL: tl.constexpr = ROWS * BLOCKS
        block = tl.arange(0, ALL)
        row = block // BLOCKS
        store_blocks(
            tl.reshape(y, (ALL, 32)), j * BLOCKS + block % BLOCKS, (row < n) & window, out_q,
            out_meta, J * BLOCKS, ALL, row * SLOTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["full"], do_not_specialize_on_alignment=["n_tokens"])
def gdn_kernel(
    columns, z, a, b, n_tokens, full, pos, ring, state, which, workspace, taps, decay, dt_bias,
    norm, out, out_q, out_meta, eps, COLUMN_STRIDE, Z_STRIDE, A_STRIDE,
    H: tl.constexpr, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    E: tl.constexpr, GROUPED: tl.constexpr, SILU: tl.constexpr, SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """full 0: a window of n_tokens[0] tokens. full T: replay n of its T tokens, if 0 < n < T.

    One compiled kernel does both, so that a replay has the bits of a window of n tokens.
    """
    N: tl.constexpr = 2 * H * K + J * V
    ROW: tl.constexpr = 2 * K + V + 4
    j = tl.program_id(0)
    h = j // (J // H) if GROUPED else j % H
    stores_keys = (j % (J // H) == 0) if GROUPED else (j < H)
    # volatile: all three are on their way before one is waited for; plain loads sink below the if
    n = tl.load(n_tokens, volatile=True)
    start = tl.load(pos, volatile=True)
    front = tl.load(which, volatile=True)
    n = tl.where(n == full, 0, n)
    window = full == 0
    # the order of these axes makes the compiler spread lanes, then warps, then registers
    i_k = tl.arange(0, _LANES)[:, None, None, None]
    i_k = i_k + _LANES * tl.arange(0, K // _LANES)[None, None, :, None]
    i_v = tl.arange(0, V // _COLUMNS)[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    r_v = tl.arange(0, V)[None, :]
    at = i_k * V + i_v[None, :, None, :]
    workspace += j * ROW
    if n > 0:
        row = tl.arange(0, ROWS)
        t = row[:, None]
        c_q = h * K + tl.arange(0, K)[None, :]
        c_k = c_q + H * K
        c_v = 2 * H * K + j * V + r_v
        # those that most work waits for first
        past_q = _columns(columns, ring, start, t, n, window, c_q, COLUMN_STRIDE, N, E, P)
        past_k = _columns(columns, ring, start, t, n, window, c_k, COLUMN_STRIDE, N, E, P)
        past_v = _columns(columns, ring, start, t, n, window, c_v, COLUMN_STRIDE, N, E, P)
        a_t = tl.load(a + row * A_STRIDE + j, mask=row < n, other=0.0)
        b_t = tl.load(b + row * A_STRIDE + j, mask=row < n, other=0.0)
        decay_j = tl.load(decay + j)
        bias_j = tl.load(dt_bias + j)
        m = tl.load(state + (front * J + j).to(tl.int64) * K * V + at)
        gate = tl.load(z + t * Z_STRIDE + j * V + r_v, mask=(t < n) & (r_v >= 0), other=0.0)
        weight = tl.load(norm + r_v)
        tl.debug_barrier()  # the assembler would put loads of the state behind the convolution
        w_q = _taps(taps, c_q, N, P)
        w_k = _taps(taps, c_k, N, P)
        w_v = _taps(taps, c_v, N, P)
        entry = ring + ((start + t) % E) * N
        ok = (t < n) & window
        tl.store(entry + c_q, past_q[P - 1], mask=ok & stores_keys & (c_q >= 0))
        tl.store(entry + c_k, past_k[P - 1], mask=ok & stores_keys & (c_k >= 0))
        tl.store(entry + c_v, past_v[P - 1], mask=ok & (c_v >= 0))
        _prepare(
            _convolved(past_q, w_q), _convolved(past_k, w_k), _convolved(past_v, w_v),
            tl.exp(decay_j * softplus(a_t + bias_j)), sigmoid(b_t), workspace, n, J * ROW,
            K, V, ROWS,
        )  # fmt: skip
        tl.debug_barrier()  # other warps read it
        behind = state + ((1 - front) * J + j).to(tl.int64) * K * V
        for i in range(0, interpreted_int(n) if INTERPRET else n):
            m, o = _step(m, workspace + i * (J * ROW), i_k, i_v, K, V)
            tl.store(out + i * (J * V) + j * V + i_v, o, mask=window & (i_v >= 0))
            # on its way while the norm is made
            tl.store(behind + at, m, mask=(at >= 0) & (i == n - 1))
        _norm_rows(
            gate, weight, out, out_q, out_meta, eps, j, n, window, J, V, SILU, SLOTS, QUANTIZE,
            ROWS,
        )  # fmt: skip


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
    n_tokens_most = len(columns_TN)
    assert n_tokens_most <= _MOST_TOKENS, f"{n_tokens_most} tokens, at most {_MOST_TOKENS}"
    entry = (n_heads, workspace_numbers(k_dim, v_dim))
    space = state.workspace
    assert space.is_contiguous() and space.shape[1:] == entry, (tuple(space.shape), entry)
    assert len(space) >= n_tokens_most, (len(space), n_tokens_most)
    gdn_kernel[(n_heads,)](
        columns_TN, z_TN, a_TJ, b_TJ, n_tokens, full, pos_T, state.ring, state.state, state.which,
        space, weights.taps_PN, weights.decay_J, weights.dt_bias_J, weights.norm_V,
        out_TN, *quantized_args(quantized, out_TN), weights.eps, columns_TN.stride(0),
        z_TN.stride(0), a_TJ.stride(0),
        H=weights.n_k_heads, J=n_heads, K=k_dim, V=v_dim, P=weights.taps_PN.shape[0],
        E=state.ring.shape[0], GROUPED=weights.head_order == "grouped",
        SILU=weights.output_gate == "silu", SLOTS=quantized_slots(quantized),
        QUANTIZE=quantized is not None, ROWS=8 if n_tokens_most <= 8 else _MOST_TOKENS,
        num_warps=min(8, v_dim // _COLUMNS.value), **EXACT,
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
