"""Tensor-core products of many tokens against the plain product in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.expert_rows import expert_rows_plain, layout
from strata.kernels.expert_rows.launch import gpu_expert
from strata.kernels.expert_rows.triton_gemm import expert_rows_many, groups_of_rows
from strata.kernels.gpu_weight import to_gpu
from strata.kernels.linear import linear
from strata.kernels.linear.triton_gemm import (
    GemmTuning,
    decode,
    half_rows,
    linear_many,
    new_half_rows,
)
from tests.kernels.test_expert_rows_triton import blobs_of
from tests.kernels.test_linear import make_weight

SMALL = GemmTuning(16, 64, 64, 4, 2)
BOUND = 2e-3
"""Relative error in the 2-norm: two operands of 11 bits, summed at random, stay far below."""


def rand(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def far(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def test_half_rows_keep_eleven_bits(triton_device):
    """Rows far beyond f16's range, tiny ones, zeros; a NaN stays in its row."""
    x = rand(0, 5, 72) * torch.tensor([1e30, 1e-25, 1.0, 0.0, 1.0])[:, None]
    x[4, 3] = float("nan")
    half = new_half_rows(6, 72, triton_device)
    half_rows(x.to(triton_device), half)
    back = half.data.cpu().double() * half.factor.cpu().double()[:, None]
    size = x[:3].abs().amax(dim=1, keepdim=True).double()
    assert ((back[:3] - x[:3]).abs() <= size * 2.0**-11).all()
    assert (back[3] == 0).all() and back[4].isnan().any()
    assert torch.equal(torch.frexp(half.factor[:3].cpu()).mantissa, torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("name", "n_rows", "n_cols", "n_tokens", "tuning"),
    [
        ("Q4_K", 40, 256, 3, GemmTuning(16, 64, 128, 4, 2)),
        ("IQ4_NL", 33, 96, 17, SMALL),  # rows, columns and tokens beyond whole rectangles
        ("Q8_0", 16, 64, 3, None),
        ("BF16", 40, 72, 17, SMALL),
        ("F32", 8, 40, 16, SMALL),
    ],
)
def test_linear_many(name, n_rows, n_cols, n_tokens, tuning, triton_device):
    """Expectation: the float64 product; outputs start as NaN, columns beyond them stay."""
    d = triton_device
    w = make_weight(name, n_rows, n_cols, np.random.default_rng(1), 0.5)
    x = rand(2, n_tokens, n_cols) * 100
    half = new_half_rows(n_tokens, n_cols, d)
    half_rows(x.to(d), half)
    wide = torch.full((n_tokens, n_rows + 2), float("nan"), device=d)
    linear_many(to_gpu(w, d), wide[:, :n_rows], half, tuning)
    assert far(wide[:, :n_rows].cpu(), linear(x, w, torch.float64)) < BOUND
    assert wide[:, n_rows:].isnan().all()


@pytest.mark.parametrize("name", ["Q6_K", "BF16"])
def test_decode(name, triton_device):
    """Expectation: the file's own numbers, rounded to f16."""
    w = make_weight(name, 20, 256, np.random.default_rng(2))
    out = torch.full((20, 256), float("nan"), dtype=torch.float16, device=triton_device)
    decode(to_gpu(w, triton_device), out)
    assert torch.equal(out.cpu(), torch.from_numpy(w.dequantize(slice(0, 20))).half())


@pytest.mark.parametrize(
    ("d", "f", "types", "layouts", "more"),
    [
        (64, 32, ("Q8_0", "Q4_0", "IQ4_NL"), ("tiles",) * 3, {"bias": True, "scales": True}),
        (40, 24, ("BF16", "F32", "F16"), ("native",) * 3, {"activation": "swiglu_oai"}),
    ],
)
def test_expert_rows_many(d, f, types, layouts, more, triton_device):
    """Expectation: expert_rows_plain in float64; rows of experts without an address stay NaN."""
    n_tokens, n_active, n_experts = 20, 2, 3
    rng = np.random.default_rng(d)
    shape = layout(d, f, types, layouts=layouts, **more)
    blobs = torch.stack(blobs_of(shape, n_experts, rng))
    expert_R = torch.from_numpy(rng.integers(0, n_experts - 1, n_tokens * n_active))
    expert_R[:6] = n_experts - 1
    on_device = blobs.to(triton_device)
    address = on_device.data_ptr() + torch.arange(n_experts) * blobs.shape[1]
    address[1] = 0
    groups = groups_of_rows(
        expert_R.to(triton_device, torch.int32), n_active, address.to(triton_device)
    )
    x = rand(3, n_tokens, d)
    half, h_half = new_half_rows(n_tokens, d, triton_device), new_half_rows(40, f, triton_device)
    half_rows(x.to(triton_device), half)
    h = torch.zeros(40, f, device=triton_device)
    rows = torch.full((40, d), float("nan"), device=triton_device)
    expert_rows_many(gpu_expert(shape), groups, half, h, h_half, rows, SMALL)
    got = rows.cpu()
    for e in range(n_experts):
        mine = (expert_R == e).nonzero().flatten()
        if e == 1:
            assert got[mine].isnan().all()
        elif len(mine):
            exact = expert_rows_plain(shape, blobs[e], x[mine // n_active], torch.float64)
            assert far(got[mine], exact) < 2 * BOUND
