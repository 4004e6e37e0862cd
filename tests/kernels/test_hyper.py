"""hyper: the formulas written out for one token, and bits that do not depend on the window."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels import hyper

T, C, D = 5, 4, 21


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_mix_is_the_mean_over_the_streams_of_the_gated_values() -> None:
    """Against the sum written out with Python floats."""
    normed, gate = draw(T, C, D), draw(T, C, D).flip(0)
    got = hyper.mix(normed, gate)
    for t, d in ((0, 0), (2, 7), (4, 20)):
        terms = [sigma(gate[t, c, d].item()) * normed[t, c, d].item() for c in range(C)]
        assert got[t, d].item() == pytest.approx(sum(terms) / C, abs=1e-14)


def test_both_nonlinearities_divide_by_the_number_of_streams_inside() -> None:
    """By hand: silu(y / C) and 2 sigma(y / C)."""
    y = draw(T, C)
    rank, coeff = hyper.rank_gate(y, C), hyper.coefficients(y, C)
    for t in range(T):
        v = y[t, 1].item() / C
        assert rank[t, 1].item() == pytest.approx(v * sigma(v), abs=1e-15)
        assert coeff[t, 1].item() == pytest.approx(2 * sigma(v), abs=1e-15)
    assert hyper.coefficients(torch.zeros(1, C), C).tolist() == [[1.0] * C]


def test_write_adds_to_every_stream_in_place() -> None:
    """Against an outer product; a coefficient of zero leaves its stream alone."""
    streams, y, coeff = draw(T, C, D), draw(T, D), draw(T, C)
    coeff[:, 2] = 0
    before = streams.clone()
    hyper.write(streams, y, coeff)
    expected = before + torch.einsum("tc,td->tcd", coeff, y)
    torch.testing.assert_close(streams, expected, rtol=0, atol=1e-15)
    assert torch.equal(streams[:, 2], before[:, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_has_the_bits_of_the_same_token_among_500(dtype: torch.dtype) -> None:
    """Against 500 tokens at once, at a hidden width that is no multiple of a vector."""
    normed, gate, y = draw(500, C, D, dtype=dtype), draw(500, C, D, dtype=dtype), draw(500, 5)
    y = y.to(dtype)
    whole = hyper.mix(normed, gate), hyper.rank_gate(y, C), hyper.coefficients(y, C)
    for t in (0, 3, 499):
        one = slice(t, t + 1)
        alone = (
            hyper.mix(normed[one].clone(), gate[one].clone()),
            hyper.rank_gate(y[one].clone(), C),
            hyper.coefficients(y[one].clone(), C),
        )
        assert all(torch.equal(p, q[one]) for p, q in zip(alone, whole, strict=True))
