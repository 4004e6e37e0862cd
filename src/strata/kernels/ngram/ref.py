"""The n-gram gate in plain torch."""

from __future__ import annotations

import math

import torch

from strata.kernels.gdn.ref import causal_conv
from strata.kernels.pointwise import sigmoid
from strata.kernels.ring import past_columns, store_columns

_FLOOR = 1e-6


def gate(key_TCD: torch.Tensor, query_TCD: torch.Tensor) -> torch.Tensor:
    """sigmoid of the signed root of the scaled dot product, per stream."""
    score_TC = (key_TCD * query_TCD).sum(-1) / math.sqrt(key_TCD.shape[-1])
    return sigmoid(score_TC.abs().clamp_min(_FLOOR).sqrt() * score_TC.sign())


def gated_value(
    key_TCD: torch.Tensor, query_TCD: torch.Tensor, value_TD: torch.Tensor
) -> torch.Tensor:
    """u = each stream's gate times the value, [T, C, D]."""
    return gate(key_TCD, query_TCD).unsqueeze(-1) * value_TD.unsqueeze(1)


def add_convolved(
    ring_XN: torch.Tensor,
    start: int,
    column_TN: torch.Tensor,
    taps_PN: torch.Tensor,
    dilation: int,
    u_TN: torch.Tensor,
    residual_TN: torch.Tensor,
) -> None:
    """residual += u + convolution of the columns, in place; columns go into the ring."""
    past = past_columns(ring_XN, start, dilation * (taps_PN.shape[0] - 1))
    y_TN = causal_conv(past, column_TN, taps_PN, dilation)
    store_columns(ring_XN, start, column_TN)
    residual_TN += u_TN + y_TN
