"""The n-gram gate in plain torch."""

from __future__ import annotations

import math

import torch

from strata.kernels.pointwise import sigmoid

_FLOOR = 1e-6


def gate(key_TCD: torch.Tensor, query_TCD: torch.Tensor) -> torch.Tensor:
    """sigmoid of the signed root of the scaled dot product, per stream."""
    score_TC = (key_TCD * query_TCD).sum(-1) / math.sqrt(key_TCD.shape[-1])
    return sigmoid(score_TC.abs().clamp_min(_FLOOR).sqrt() * score_TC.sign())
