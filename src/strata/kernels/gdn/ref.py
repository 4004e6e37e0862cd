"""Gated DeltaNet in plain torch, token by token; letters and formulas: the package docstring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.kernels.blocks import row_blocks
from strata.kernels.pointwise import exp, sigmoid, silu, softplus
from strata.kernels.ring import past_columns, store_columns
from strata.kernels.rms_norm import rms_norm

L2_EPS = 1e-6


def causal_conv(
    past_XN: torch.Tensor, x_TN: torch.Tensor, taps_PN: torch.Tensor, dilation: int = 1
) -> torch.Tensor:
    """Depthwise causal convolution and silu; past_XN: the columns before x, oldest first."""
    n_tokens, n_taps = x_TN.shape[0], taps_PN.shape[0]
    assert past_XN.shape[0] == dilation * (n_taps - 1), "past is what the first token's taps reach"
    columns = torch.cat([past_XN, x_TN])
    # products and sums apart: torch would fuse them in whole vectors only, not in the last elements
    y_TN = torch.empty_like(x_TN)
    for rows in row_blocks(n_tokens, x_TN.shape[1]):
        total = columns[:n_tokens][rows] * taps_PN[0]
        for tap in range(1, n_taps):
            total += columns[tap * dilation :][:n_tokens][rows] * taps_PN[tap]
        y_TN[rows] = silu(total)
    return y_TN


def l2_norm(x_THK: torch.Tensor) -> torch.Tensor:
    """Each head's vector at length one."""
    return x_THK * torch.rsqrt((x_THK * x_THK).sum(-1, keepdim=True) + L2_EPS)


def gates(
    a_TJ: torch.Tensor, b_TJ: torch.Tensor, decay_J: torch.Tensor, dt_bias_J: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a token keeps of the state (0..1) and how strongly it writes (0..1), per value head."""
    keep_TJ = exp(decay_J * softplus(a_TJ + dt_bias_J))
    return keep_TJ, sigmoid(b_TJ)


@dataclass(frozen=True)
class ConvWeights:
    """What ``inputs`` needs besides activations; N = 2 * n_k_heads * k_dim + n_v_heads * v_dim."""

    taps_PN: torch.Tensor
    decay_J: torch.Tensor
    dt_bias_J: torch.Tensor
    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int


def inputs(
    ring_XN: torch.Tensor,
    start: int,
    columns_TN: torch.Tensor,
    a_TJ: torch.Tensor,
    b_TJ: torch.Tensor,
    w: ConvWeights,
    out: Sequence[torch.Tensor],
) -> None:
    """The inputs of the recurrence from the projections; columns go into the ring."""
    past = past_columns(ring_XN, start, w.taps_PN.shape[0] - 1)
    y_TN = causal_conv(past, columns_TN, w.taps_PN, 1)
    store_columns(ring_XN, start, columns_TN)
    k_width, heads = w.n_k_heads * w.k_dim, (-1, w.n_k_heads, w.k_dim)
    q_THK = l2_norm(y_TN[:, :k_width].reshape(heads)) / math.sqrt(w.k_dim)
    k_THK = l2_norm(y_TN[:, k_width : 2 * k_width].reshape(heads))
    keep_TJ, beta_TJ = gates(a_TJ, b_TJ, w.decay_J, w.dt_bias_J)
    made = (q_THK, k_THK, y_TN[:, 2 * k_width :], keep_TJ, beta_TJ)
    for buffer, value in zip(out, made, strict=True):
        buffer.copy_(value.reshape(buffer.shape))


def recurrence(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TJV: torch.Tensor,
    keep_TJ: torch.Tensor,
    beta_TJ: torch.Tensor,
    key_head_J: torch.Tensor,
    state_in_JKV: torch.Tensor,
    state_out_JKV: torch.Tensor,
    out_TJV: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated delta rule over T tokens; returns o_TJV, leaves the new state in state_out."""
    state = state_out_JKV
    if state.data_ptr() != state_in_JKV.data_ptr():
        state.copy_(state_in_JKV)
    o_TJV = torch.empty_like(v_TJV) if out_TJV is None else out_TJV
    for t in range(v_TJV.shape[0]):
        q_JK1 = q_THK[t].index_select(0, key_head_J).unsqueeze(-1)
        k_JK1 = k_THK[t].index_select(0, key_head_J).unsqueeze(-1)
        state *= keep_TJ[t, :, None, None]
        u_JV = (v_TJV[t] - (state * k_JK1).sum(-2)) * beta_TJ[t, :, None]
        state += k_JK1 * u_JV.unsqueeze(-2)
        o_TJV[t] = (state * q_JK1).sum(-2)
    return o_TJV


def gated_norm(
    o_TJV: torch.Tensor,
    z_TJV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    gate: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm over V, times the plain weight, times silu(z) or sigmoid(z)."""
    opened = silu if gate == "silu" else sigmoid
    y_TJV = torch.empty_like(o_TJV) if out is None else out
    for rows in row_blocks(o_TJV.shape[0], o_TJV.shape[1] * o_TJV.shape[2]):
        y_TJV[rows] = rms_norm(o_TJV[rows], weight_V, eps) * opened(z_TJV[rows])
    return y_TJV
