"""Transcendental functions on rows that are padded to whole vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# Elements: two vectors of 16 floats (AVX-512) are one turn of torch's loop; and twice that.
_ROW_MULTIPLE = 64


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the x."""
    return _on_whole_vectors(torch.exp, x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x)."""
    return _on_whole_vectors(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), and x itself above 20 as in torch."""
    return _on_whole_vectors(F.softplus, x)


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> None:
    """gate becomes silu(gate) * up."""
    gate.copy_(silu(gate) * up)


def sigmoid_times(y: torch.Tensor, gate: torch.Tensor) -> None:
    """y becomes y * sigmoid(gate); gate broadcasts."""
    y *= sigmoid(gate)


def _on_whole_vectors(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    n = x.shape[-1]
    pad = -n % _ROW_MULTIPLE
    if pad == 0:
        return function(x.contiguous())
    return function(F.pad(x, (0, pad)))[..., :n]
