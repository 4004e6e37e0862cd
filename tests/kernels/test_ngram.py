"""ngram: the gate written out, its floor, and bits that do not depend on the window."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels import ngram

T, C, D = 500, 4, 21


def draw(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(T, C, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_gate_is_sigma_of_the_signed_root_of_the_scaled_product() -> None:
    """Against the formula in Python floats."""
    key, query = draw(1, torch.float64), draw(2, torch.float64)
    got = ngram.gate(key, query)
    for t, c in ((0, 0), (7, 3), (499, 1)):
        s = sum(a * b for a, b in zip(key[t, c].tolist(), query[t, c].tolist(), strict=True))
        s /= math.sqrt(D)
        root = math.copysign(math.sqrt(max(abs(s), 1e-6)), s)
        assert got[t, c].item() == pytest.approx(1 / (1 + math.exp(-root)), abs=1e-14)


def test_small_products_keep_their_sign_at_the_floor() -> None:
    """By hand: |s| below 1e-6 counts as 1e-6, and exactly zero opens the gate half."""
    key = torch.zeros(1, 3, 1, dtype=torch.float64)
    key[0, :, 0] = torch.tensor([1e-9, -1e-9, 0.0])
    got = ngram.gate(key, torch.ones_like(key))[0]
    expected = [1 / (1 + math.exp(-1e-3)), 1 / (1 + math.exp(1e-3)), 0.5]
    assert got.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_has_the_bits_of_the_same_token_among_500(dtype: torch.dtype) -> None:
    """Against 500 tokens at once."""
    key, query = draw(3, dtype), draw(4, dtype)
    whole = ngram.gate(key, query)
    for t in (0, 1, 499):
        alone = ngram.gate(key[t : t + 1].clone(), query[t : t + 1].clone())
        assert torch.equal(alone, whole[t : t + 1])
