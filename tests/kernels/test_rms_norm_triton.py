"""add_norm on the device against kernels/rms_norm, kernels/hyper and kernels/quantize in torch."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.hyper import write
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize import quantize as quantize_ref
from strata.kernels.rms_norm import rms_norm as rms_norm_ref
from strata.kernels.rms_norm.triton import Pending, add_norm, rms_norm

EPS = 1e-6


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("streams", [1, 4])
def test_pending_and_late_writes_then_norm(triton_device: torch.device, streams: int) -> None:
    """Expectation: kernels/hyper.write twice (plain: coefficient 1), then rms_norm by stream."""
    n_tokens, width = 3, 96
    residual = rand(0, n_tokens, streams, width)
    out, late, bias = rand(1, n_tokens, width), rand(2, n_tokens, width), rand(3, width)
    ones = torch.ones(n_tokens, 1)
    coeff, late_coeff = (rand(s, n_tokens, streams) if streams > 1 else ones for s in (4, 5))
    weight = rand(6, streams * width)
    expected = residual.clone()
    write(expected, out + bias, coeff)
    write(expected, late, late_coeff)
    expected_x = rms_norm_ref(expected.flatten(1), weight, EPS, groups=streams)

    d = triton_device
    residual = residual.to(d)
    x = torch.full((n_tokens, streams * width), float("nan"), device=d)
    quantized = new_quantized(n_tokens, streams * width, d)
    hyper = streams > 1
    add_norm(
        residual, weight.to(d), EPS, x,
        pending=Pending(out.to(d), coeff.to(d) if hyper else None, bias.to(d)),
        late=Pending(late.to(d), late_coeff.to(d) if hyper else None),
        quantized=quantized,
    )  # fmt: skip
    torch.testing.assert_close(residual.cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.cpu(), expected_x, rtol=1e-5, atol=1e-5)
    same = new_quantized(n_tokens, streams * width, "cpu")
    quantize_ref(x.cpu(), same)
    assert torch.equal(quantized.q.cpu(), same.q)
    assert torch.equal(quantized.meta.cpu(), same.meta)


def test_norm_alone_leaves_its_input(triton_device: torch.device) -> None:
    """Expectation: kernels/rms_norm; a width that is no power of two."""
    x, weight = rand(0, 5, 40), rand(1, 40)
    held = x.to(triton_device)
    out = torch.full_like(held, float("nan"))
    rms_norm(held, weight.to(triton_device), EPS, out)
    torch.testing.assert_close(out.cpu(), rms_norm_ref(x, weight, EPS), rtol=1e-5, atol=1e-5)
    assert torch.equal(held.cpu(), x)


def test_write_alone(triton_device: torch.device) -> None:
    """Without a weight only the write happens: residual + out, one f32 addition."""
    residual, out = rand(0, 2, 64), rand(1, 2, 64)
    held = residual.clone().to(triton_device)
    add_norm(held, None, EPS, None, pending=Pending(out.to(triton_device)))
    assert torch.equal(held.cpu(), residual + out)


def test_a_token_alone_has_the_same_bits(triton_device: torch.device) -> None:
    """T-independence: each token of a window of 4 by itself."""
    residual, weight = rand(0, 4, 4, 96).to(triton_device), rand(1, 384).to(triton_device)
    together = torch.empty(4, 384, device=triton_device)
    add_norm(residual, weight, EPS, together)
    for t in range(4):
        alone = torch.empty(1, 384, device=triton_device)
        add_norm(residual[t : t + 1], weight, EPS, alone)
        assert torch.equal(alone[0], together[t])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("scale", [1e17, 1e19, 1e30, 1e37])
def test_squares_beyond_float32(triton_device: torch.device, scale: float) -> None:
    """C18: squares that overflow must not give zeros; the norm has no units, so the expectation is
    that of the same row without the scale (and without eps, which is nothing beside it)."""
    x, weight = rand(0, 3, 40), rand(1, 40)
    held = (x * scale).to(triton_device)
    out = torch.full_like(held, float("nan"))
    rms_norm(held, weight.to(triton_device), EPS, out)
    torch.testing.assert_close(out.cpu(), rms_norm_ref(x, weight, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinity_stays_visible(triton_device: torch.device) -> None:
    """C18: a residual that overflowed gives NaN, which the engine refuses, and no finite row."""
    x = torch.full((1, 40), float("inf"), device=triton_device)
    out = torch.zeros_like(x)
    rms_norm(x, torch.ones(40, device=triton_device), EPS, out)
    assert bool(out.isnan().all())
