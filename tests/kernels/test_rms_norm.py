"""rms_norm against the formula in NumPy float64, and bit-equality over window sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.rms_norm import rms_norm


def _formula(x: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> np.ndarray:
    """The definition, in NumPy float64."""
    parts = x.double().numpy().reshape(-1, groups, x.shape[-1] // groups)
    y = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    return (y.reshape(-1, x.shape[-1]) * weight.double().numpy()).reshape(x.shape)


@pytest.mark.parametrize(
    "shape,groups", [((5, 7), 1), ((3, 4, 32), 1), ((40, 2560), 4), ((1, 1), 1)]
)
@pytest.mark.parametrize("dtype,tol", [(torch.float32, 4e-7), (torch.float64, 1e-15)])
def test_equals_the_formula(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, tol: float
) -> None:
    """Expectation: the definition in NumPy float64 of the same rounded inputs."""
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=dtype)
    y = rms_norm(x, weight, 1e-6, groups)
    assert y.dtype == dtype and y.shape == x.shape
    expected = _formula(x, weight, 1e-6, groups)
    np.testing.assert_allclose(y.double().numpy(), expected, rtol=tol, atol=tol)


def test_extreme_values() -> None:
    """Squares of 1e25 overflow float32, squares of 1e-30 vanish in it; the sums are float64."""
    x = torch.tensor([[1e25, -1e25], [1e-30, 1e-30], [0.0, 0.0]])
    y = rms_norm(x, torch.ones(2), 1e-6)
    assert torch.equal(y[0], torch.tensor([1.0, -1.0]))
    np.testing.assert_allclose(y[1].numpy(), 1e-27, rtol=1e-6)
    assert torch.equal(y[2], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width,groups", [(7, 1), (192, 4), (1000, 1)])
def test_bits_do_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, width: int, groups: int
) -> None:
    """Expectation: each token alone; also for rows that are a slice of a wider buffer."""
    torch.manual_seed(2)
    wide = torch.randn(500, width + 3, dtype=dtype)
    x, weight = wide[:, 1 : width + 1], torch.randn(width, dtype=dtype)
    together = rms_norm(x, weight, 1e-5, groups)
    for t in range(500):
        assert torch.equal(rms_norm(x[t : t + 1], weight, 1e-5, groups)[0], together[t])
