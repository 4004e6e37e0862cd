"""Products with few long rows: the contract bit for bit, whatever the division into programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.gpu_weight import GpuWeight, to_gpu
from strata.kernels.linear import linear_contract
from strata.kernels.linear.triton_long import (
    LongTuning,
    is_long,
    linear_long,
    workspace_numbers,
)
from strata.kernels.quantize import new_quantized, quantize
from tests.kernels.test_linear import make_weight, same_bits
from tests.kernels.test_linear_triton import rows
from tests.kernels.test_linear_triton import run as run_all
from tests.kernels.test_quantize import hard_rows


def run(w, x, device, tuning=None):
    """The product; output and workspace start as NaN."""
    n_tokens, n_cols = x.shape
    x_q = new_quantized(n_tokens, n_cols, "cpu")
    quantize(x, x_q)
    x_q = type(x_q)(n_cols, x_q.q.to(device), x_q.meta.to(device))
    weight = to_gpu(w, device)
    out = torch.full((n_tokens, w.n_rows), float("nan"), device=device)
    space = torch.full((workspace_numbers(weight, n_tokens, tuning),), float("nan"), device=device)
    linear_long(weight, out, x_q, space, tuning)
    return out.cpu()


@pytest.mark.parametrize(
    ("name", "n_rows", "n_blocks", "n_tokens", "tuning"),
    [
        ("Q8_0", 20, 9, 1, None),  # short segments, rows that fill no tile
        ("Q8_0", 5, 80, 1, LongTuning(4, 32, 4, 2)),  # more blocks than a segment loads ahead
        ("IQ3_S", 8, 8, 3, LongTuning(8, 8, 1, 3)),
        ("Q4_K", 6, 16, 2, LongTuning(4, 16, 1, 1)),  # minimums
        ("Q2_K", 4, 8, 1, LongTuning(2, 8, 1, 2)),  # groups of 16 with minimums
        ("Q6_K", 16, 24, 2, LongTuning(16, 8, 1, 2)),
        ("IQ4_NL", 4, 10, 4, LongTuning(4, 16, 1, 2)),
        ("NVFP4", 4, 12, 1, LongTuning(4, 8, 1, 2)),  # groups of 16, a scale of its own
        ("Q2_0", 8, 16, 1, LongTuning(8, 8, 1, 2)),
    ],
)
def test_equal_to_contract(name, n_rows, n_blocks, n_tokens, tuning, triton_device):
    """Expectation: linear_contract."""
    rng = np.random.default_rng(n_rows + n_blocks)
    w = make_weight(name, n_rows, 32 * n_blocks, rng, scale=0.37 if name == "NVFP4" else 1.0)
    x = rows(rng, n_tokens, 32 * n_blocks)
    same_bits(run(w, x, triton_device, tuning), linear_contract(x, w))


def test_bad_activations(triton_device):
    """Expectation: linear_contract, when blocks hold NaN, infinity, zeros or tiny numbers."""
    rng = np.random.default_rng(3)
    w, x = make_weight("Q4_K", 16, 256, rng), torch.from_numpy(hard_rows(3, 256, rng))
    same_bits(run(w, x, triton_device), linear_contract(x, w))


def test_among_other_matrices(triton_device):
    """``linear`` takes it apart from the others of its input: contract, and the float order."""
    rng = np.random.default_rng(6)
    w = make_weight("Q8_0", 8, 8192, rng)
    assert is_long(to_gpu(w, "cpu"))
    assert not is_long(GpuWeight("Q8_0", 700, 8192, torch.empty(0, dtype=torch.uint8)))
    short = make_weight("F32", 3, 8192, rng)
    x = rows(rng, 1, 8192)
    got = run_all([w, short], x, triton_device)
    same_bits(got[0], linear_contract(x, w))
    same_bits(got[1], run_all([short], x, triton_device)[0])
