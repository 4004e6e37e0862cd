"""Hyper-connection reads and writes in plain torch; formulas are in the package docstring."""

from __future__ import annotations

import torch

from strata.kernels.blocks import row_blocks
from strata.kernels.pointwise import sigmoid, silu


def rank_gate(down_TR: torch.Tensor, n_streams: int) -> torch.Tensor:
    """silu(y / C) of the low-rank product (R here: hc rank)."""
    return silu(down_TR / n_streams)


def read_gates(low_TR: torch.Tensor, coeff_TC: torch.Tensor | None, n_streams: int) -> None:
    """In place: rank_gate of low, coefficients of coeff."""
    low_TR.copy_(rank_gate(low_TR, n_streams))
    if coeff_TC is not None:
        coeff_TC.copy_(coefficients(coeff_TC, n_streams))


def mix(
    normed_TCD: torch.Tensor, gate_TCD: torch.Tensor, out_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over the streams of sigmoid(gate) * normed -> [T, D], in out if given."""
    n_tokens, n_streams, width = normed_TCD.shape
    x_TD = normed_TCD.new_empty(n_tokens, width) if out_TD is None else out_TD
    for rows in row_blocks(n_tokens, n_streams * width):
        gated = sigmoid(gate_TCD[rows]) * normed_TCD[rows]
        total = gated[:, 0]
        for stream in range(1, n_streams):
            total += gated[:, stream]
        x_TD[rows] = total / n_streams
    return x_TD


def coefficients(inject_TC: torch.Tensor, n_streams: int) -> torch.Tensor:
    """2 * sigmoid(y / C): how much each stream receives of the block's output."""
    return 2 * sigmoid(inject_TC / n_streams)


def write(streams_TCD: torch.Tensor, y_TD: torch.Tensor, coeff_TC: torch.Tensor) -> None:
    """S[t, c] += coeff[t, c] * y[t], in place."""
    streams_TCD += coeff_TC.unsqueeze(-1) * y_TD.unsqueeze(1)
