"""rotary against complex multiplication, at any position, and bit-equality over window sizes."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from strata.kernels.rotary import rotary
from strata.models.spec import RotarySpec


def _rotated(x: list[float], pos: int, spec: RotarySpec) -> list[float]:
    """One head by Python's complex numbers: pair a + ib times factor * e^(i pos f)."""
    n, y = len(spec.inv_freq), list(x)
    for i, freq in enumerate(spec.inv_freq):
        a, b = (i, i + n) if spec.pairing == "half" else (2 * i, 2 * i + 1)
        z = complex(x[a], x[b]) * spec.attention_factor * cmath.exp(1j * (pos * freq))
        y[a], y[b] = z.real, z.imag
    return y


def _spec(pairing: str, n: int = 5) -> RotarySpec:
    freqs = tuple(1e4 ** (-i / n) for i in range(n))
    return RotarySpec(freqs, pairing, attention_factor=1.25)  # type: ignore[arg-type]


@pytest.mark.parametrize("pairing", ["half", "pairs"])
@pytest.mark.parametrize("dtype,tol", [(torch.float32, 3e-6), (torch.float64, 1e-12)])
def test_equals_complex_rotation(pairing: str, dtype: torch.dtype, tol: float) -> None:
    """Expectation: Python complex numbers in double precision, up to position 262,143."""
    torch.manual_seed(1)
    pos = torch.tensor([262143, 0, 1, 255, 256, 257, 100_000, 0])
    spec, x = _spec(pairing), torch.randn(len(pos), 3, 13, dtype=dtype)
    y = rotary(x, pos, spec)
    assert y.dtype == dtype
    for t, p in enumerate(pos.tolist()):
        for head in range(3):
            expected = _rotated(x[t, head].tolist(), p, spec)
            assert y[t, head].tolist() == pytest.approx(expected, abs=tol)


def test_unrotated_dims_and_input_are_untouched() -> None:
    """Expectation: dims from 2n on are x's own, and x itself does not change."""
    x = torch.randn(4, 2, 13)
    before = x.clone()
    y = rotary(x, torch.arange(4), _spec("half"))
    assert torch.equal(y[..., 10:], x[..., 10:])
    assert torch.equal(x, before)
    assert not torch.equal(y[1:, :, :10], x[1:, :, :10])


def test_far_position_keeps_its_precision() -> None:
    """Expectation: cos of the exact product. A float32 angle would be off by up to 0.008 rad."""
    freq = 0.7071067690849304
    x = torch.tensor([[[1.0, 0.0]]])
    y = rotary(x, torch.tensor([262143]), RotarySpec((freq,), "half"))
    assert y[0, 0, 0].item() == pytest.approx(math.cos(262143 * freq), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pairing", ["half", "pairs"])
def test_bits_do_not_depend_on_the_number_of_tokens(dtype: torch.dtype, pairing: str) -> None:
    """Expectation: each token alone; the input is a slice of a wider buffer."""
    torch.manual_seed(2)
    x = torch.randn(500, 2, 20, dtype=dtype)[..., 3:16]
    pos = torch.arange(700, 1200)
    together = rotary(x, pos, _spec(pairing))
    for t in range(500):
        assert torch.equal(rotary(x[t : t + 1], pos[t : t + 1], _spec(pairing))[0], together[t])


def test_no_tokens() -> None:
    """Expectation: an empty window gives an empty result."""
    assert rotary(torch.empty(0, 2, 12), torch.arange(0), _spec("half")).shape == (0, 2, 12)
