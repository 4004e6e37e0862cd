"""The quantize kernel against contract 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.quantize import new_quantized, quantize
from strata.kernels.quantize.triton import quantize as quantize_triton
from tests.kernels.test_quantize import hard_rows, slots_of_blocks


@pytest.mark.parametrize("n_cols", [32, 320, 640])
def test_equals_reference(n_cols, triton_device):
    """Expectation: kernels.quantize.ref on the CPU, bit for bit in every slot of a block."""
    x = torch.from_numpy(hard_rows(3, n_cols, np.random.default_rng(n_cols)))
    expected, got = new_quantized(3, n_cols, "cpu"), new_quantized(4, n_cols, triton_device)
    quantize(x, expected)
    quantize_triton(x.to(triton_device), got)
    slots = slots_of_blocks(n_cols)
    assert torch.equal(got.q.cpu()[:3, slots], expected.q[:, slots])
    assert torch.equal(got.meta.cpu()[:3, slots], expected.meta[:, slots])
    assert not got.q[3].any(), "rows beyond T are left alone"
