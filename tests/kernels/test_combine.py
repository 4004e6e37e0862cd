"""The weighted sum of expert rows: order, roundings, skipped rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.combine import combine


def by_hand(rows, weight, valid, shared):
    """Contract 6 with NumPy scalars: two roundings per rank, ranks ascending."""
    n_tokens, n_active = weight.shape
    out = np.zeros((n_tokens, rows.shape[1]), rows.dtype)
    for t in range(n_tokens):
        for d in range(rows.shape[1]):
            acc = shared[t, d] if shared is not None else rows.dtype.type(0)
            for j in range(n_active):
                if valid[t * n_active + j]:
                    acc = acc + weight[t, j] * rows[t * n_active + j, d]
            out[t, d] = acc
    return out


@settings(max_examples=50, deadline=None)
@given(
    n_tokens=st.integers(0, 4),
    n_active=st.integers(1, 8),
    width=st.integers(1, 5),
    with_shared=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_scalar_loop(n_tokens, n_active, width, with_shared, dtype, seed):
    """Expectation: contract 6 by hand, bit for bit; skipped rows hold NaN and do not matter."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_tokens * n_active, width)).astype(dtype)
    weight = rng.random((n_tokens, n_active)).astype(dtype)
    valid = rng.random(n_tokens * n_active) < 0.7
    rows[~valid] = np.nan
    shared = rng.standard_normal((n_tokens, width)).astype(dtype) if with_shared else None
    before = None if shared is None else shared.copy()
    y = combine(
        torch.from_numpy(rows),
        torch.from_numpy(weight),
        torch.from_numpy(valid),
        None if shared is None else torch.from_numpy(shared),
    )
    np.testing.assert_array_equal(y.numpy(), by_hand(rows, weight, valid, shared))
    if shared is not None:
        np.testing.assert_array_equal(shared, before)


def test_rank_order_and_two_roundings():
    """Numbers that tell orders and a contraction apart (worked out by hand in f32)."""
    rows = torch.tensor([[1.0], [2.0**-24], [2.0**-24]])
    ones = torch.ones(1, 3)
    # 1 + 2^-24 ties to even and stays 1, twice; ascending from the small end it would be 1 + 2^-23
    assert combine(rows, ones).item() == 1.0
    assert combine(rows.flip(0), ones).item() == 1.0 + 2.0**-23
    # (1 + 2^-12)^2 rounds to 1 + 2^-11; one rounding at the end would keep 2^-24
    x = torch.tensor([[1 + 2.0**-12]])
    shared = torch.tensor([[-(1 + 2.0**-11)]])
    assert combine(x, torch.tensor([[1 + 2.0**-12]]), None, shared).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_and_no_valid_row(dtype):
    """The result has the rows' dtype; a token without any computed row is its shared part, or 0."""
    rows = torch.full((4, 3), float("nan"), dtype=dtype)
    weight = torch.ones(2, 2)
    nothing = torch.zeros(4, dtype=torch.bool)
    y = combine(rows, weight, nothing)
    assert y.dtype == dtype and y.tolist() == [[0.0] * 3] * 2
    shared = torch.arange(6, dtype=dtype).view(2, 3)
    assert torch.equal(combine(rows, weight, nothing, shared), shared)


def test_nan_of_a_valid_row_is_not_hidden():
    """A NaN that was computed must reach the result (C18: reported, never swallowed)."""
    rows = torch.zeros(2, 3)
    rows[1, 1] = float("nan")
    y = combine(rows, torch.ones(1, 2), torch.tensor([True, True]))
    assert torch.isnan(y[0]).tolist() == [False, True, False]
