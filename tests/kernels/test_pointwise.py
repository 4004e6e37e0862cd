"""pointwise: values against libm in float64, and bits that do not depend on the shape around."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from strata.kernels import pointwise

torch.set_num_threads(1)

TRUTH: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "softplus": lambda x: math.log1p(math.exp(x)),
}


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_values(name: str, dtype: torch.dtype, rtol: float) -> None:
    """Against Python's math module."""
    x = torch.linspace(-20, 20, 401, dtype=dtype)
    expected = torch.tensor([TRUTH[name](v) for v in x.tolist()], dtype=torch.float64)
    got = getattr(pointwise, name)(x).double()
    torch.testing.assert_close(got, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("width", [1, 6, 48, 64, 100, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_row_has_the_bits_of_the_same_row_among_many(
    name: str, width: int, dtype: torch.dtype
) -> None:
    """Against itself on 100 rows at once; plain torch fails this at widths 6 and 100."""
    function = getattr(pointwise, name)
    x = 4 * torch.randn(100, width, generator=torch.Generator().manual_seed(1), dtype=dtype)
    many = function(x)
    for rows in (1, 3, 8):
        parts = [function(x[i : i + rows].clone()) for i in range(0, len(x), rows)]
        assert torch.equal(torch.cat(parts), many)
    # a view whose rows lie apart in memory
    assert torch.equal(function(torch.cat([x, x], dim=1)[:, :width]), many)


def test_softplus_above_20_is_its_argument() -> None:
    """torch's rule, which transformers follows; the term left out is below 2.1e-9."""
    x = torch.tensor([20.5, 50.0, 1000.0], dtype=torch.float64)
    assert torch.equal(pointwise.softplus(x), x)


def test_nan_and_infinity_stay_visible() -> None:
    """IEEE limits: a NaN must reach the output, infinities saturate."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf")])
    sigmoid = pointwise.sigmoid(x)
    assert sigmoid[0].isnan() and sigmoid[1:].tolist() == [1.0, 0.0]
    assert pointwise.exp(x)[0].isnan() and pointwise.silu(x)[0].isnan()
