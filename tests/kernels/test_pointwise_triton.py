"""scale_rows on the device against kernels/pointwise; it also tests the device's sigmoid. silu and
softplus are tested with the layers that use them (GDN, hyper-connections)."""

from __future__ import annotations

import torch

from strata.kernels.pointwise import sigmoid
from strata.kernels.pointwise.triton import scale_rows
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize import quantize as quantize_ref


def test_scale_rows(triton_device: torch.device) -> None:
    """Gates from far below to far above, in a column of a wider buffer; 9 blocks of 32."""
    y = torch.randn(5, 288, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(5, 3)
    wide[:, 1] = torch.tensor([-200.0, -3.0, 0.0, 2.5, 200.0])
    expected = sigmoid(wide[:, 1:2]) * y
    held, quantized = y.clone().to(triton_device), new_quantized(5, 288, triton_device)
    scale_rows(held, wide.to(triton_device)[:, 1], quantized)
    torch.testing.assert_close(held.cpu(), expected, rtol=1e-6, atol=1e-7)
    same = new_quantized(5, 288, "cpu")
    quantize_ref(held.cpu(), same)
    assert torch.equal(quantized.q.cpu(), same.q)
    assert torch.equal(quantized.meta.cpu(), same.meta)
