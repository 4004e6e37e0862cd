"""Decoded rectangles of matrices against the file's own dequantization, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from strata.formats.tiles import tile_format
from strata.formats.weight_types import TYPES
from strata.kernels.gpu_matrix import matrix_of
from strata.kernels.gpu_weight import to_gpu
from strata.kernels.tile_values import matrix_values
from tests.kernels.test_linear import make_weight

TILED = sorted(name for name in TYPES if tile_format(name) is not None)


@triton.jit
def copy_kernel(base, first, out, M: tl.constexpr, TILES: tl.constexpr):
    """Rows 4 .. 35 and 64 columns from ``first`` on."""
    r = tl.arange(0, 32)
    values = matrix_values(M, TILES, base, 4 + r, first, 64)
    tl.store(out + r[:, None] * 64 + tl.arange(0, 64)[None, :], values)


@pytest.mark.parametrize("name", [*TILED, "BF16", "F16", "F32"])
def test_equals_dequantization(name, triton_device):
    """Expectation: Weight.dequantize; rows and columns beyond the matrix are 0."""
    w = make_weight(name, 20, 256, np.random.default_rng(len(name)))
    weight = to_gpu(w, triton_device)
    expected = torch.zeros(36, 320)
    expected[:20, :256] = torch.from_numpy(w.dequantize(slice(0, 20)))
    for first in (32, 224):
        out = torch.full((32, 64), float("nan"), device=triton_device)
        copy_kernel[(1,)](
            weight.data.data_ptr(), first, out, M=matrix_of(weight), TILES=weight.is_tiles
        )
        assert torch.equal(out.cpu(), expected[4:, first : first + 64])
