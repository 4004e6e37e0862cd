"""Which implementation answers each op without a GPU: native code, or plain torch for reference
runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from strata.kernels.linear.ref import linear
from strata.kernels.native_ops import native_ops
from strata.kernels.ops import Ops, reference_ops

__all__ = ["native_ops", "plain_ops"]


def plain_ops(dtype: torch.dtype) -> Ops:
    """Reference ops; weights are dequantized to dtype for every product."""
    return replace(reference_ops(dtype), linear=lambda x, w: linear(x, w, dtype))
