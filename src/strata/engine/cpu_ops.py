"""Which implementation answers each op without a GPU: native code where it is faster, plain torch
elsewhere."""

from __future__ import annotations

from dataclasses import replace

import torch

from strata.kernels.linear.ref import linear
from strata.kernels.ops import Ops, reference_ops
from strata.native import CpuPool


def plain_ops(dtype: torch.dtype) -> Ops:
    """Reference ops; weights are dequantized to dtype for every product."""
    return replace(reference_ops(dtype), linear=lambda x, w: linear(x, w, dtype))


def native_ops(pool: CpuPool) -> Ops:
    """float32 with the pool's products, attention and recurrence."""
    return replace(
        reference_ops(torch.float32),
        linear=lambda x, w: pool.linear(w, x),
        attention=pool.attention,
        gdn_recurrence=pool.gdn_recurrence,
    )
