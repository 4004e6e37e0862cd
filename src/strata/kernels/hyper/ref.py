"""Hyper-connection reads and writes in plain torch; formulas are in the package docstring."""

from __future__ import annotations

import torch

from strata.kernels.pointwise import sigmoid, silu


def rank_gate(down_TR: torch.Tensor, n_streams: int) -> torch.Tensor:
    """silu(y / C) of the low-rank product (R here: hc rank)."""
    return silu(down_TR / n_streams)


def mix(normed_TCD: torch.Tensor, gate_TCD: torch.Tensor) -> torch.Tensor:
    """Mean over the streams of sigmoid(gate) * normed -> [T, D]."""
    gated = sigmoid(gate_TCD) * normed_TCD
    n_streams = gated.shape[1]
    x_TD = gated[:, 0].clone()
    for stream in range(1, n_streams):
        x_TD += gated[:, stream]
    return x_TD / n_streams


def coefficients(inject_TC: torch.Tensor, n_streams: int) -> torch.Tensor:
    """2 * sigmoid(y / C): how much each stream receives of the block's output."""
    return 2 * sigmoid(inject_TC / n_streams)


def write(streams_TCD: torch.Tensor, y_TD: torch.Tensor, coeff_TC: torch.Tensor) -> None:
    """S[t, c] += coeff[t, c] * y[t], in place."""
    streams_TCD += coeff_TC.unsqueeze(-1) * y_TD.unsqueeze(1)
