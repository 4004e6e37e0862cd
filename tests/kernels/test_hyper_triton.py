"""The hyper-connection READ on the device against kernels/hyper with torch products."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.gpu_weight import DTYPE_NAMES, GpuWeight
from strata.kernels.hyper import coefficients, mix, rank_gate
from strata.kernels.hyper import triton as gpu
from strata.kernels.hyper.triton_read import StreamWeights, is_plain, is_wide, new_turns
from strata.kernels.hyper.triton_read import read as read_at_once
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize import quantize as quantize_ref
from strata.kernels.rms_norm.triton import Pending, add_norm

T, C, D, R = 2, 2, 32, 8


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(data: torch.Tensor) -> GpuWeight:
    return GpuWeight(DTYPE_NAMES[data.dtype], *data.shape, data)


def read(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs, and what kernels/hyper makes of them in float64."""
    xn = rand(0, T, C * D)
    down, inject, up = (
        rand(seed, *shape).to(dtype) * 0.2
        for seed, shape in ((1, (R, C * D)), (2, (C, C * D)), (3, (C * D, R)))
    )
    wide = xn.double()
    lo = rank_gate(wide @ down.double().t(), C)
    gate = lo @ up.double().t()
    return {
        "xn": xn,
        "down": down,
        "inject": inject,
        "up": up,
        "lo": lo.float(),
        "gate": gate.float(),
        "coeff": coefficients(wide @ inject.double().t(), C).float(),
        "x": mix(wide.view(T, C, D), gate.view(T, C, D)).float(),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_down_and_up_mix(triton_device: torch.device, dtype: torch.dtype) -> None:
    r = {name: value.to(triton_device) for name, value in read(dtype).items()}
    lo, coeff, x = (torch.full_like(r[name], float("nan")) for name in ("lo", "coeff", "x"))
    gpu.down(r["xn"], weight(r["down"]), weight(r["inject"]), C, lo, coeff)
    torch.testing.assert_close(lo, r["lo"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(coeff, r["coeff"], rtol=1e-5, atol=1e-5)
    alone = torch.full_like(coeff, float("nan"))
    gpu.write_coefficients(r["xn"], weight(r["inject"]), C, alone)
    assert torch.equal(alone, coeff)
    quantized = new_quantized(T, D, triton_device)
    gpu.up_mix(r["lo"], weight(r["up"]), r["xn"], C, x, quantized)
    torch.testing.assert_close(x, r["x"], rtol=1e-5, atol=1e-5)
    same = new_quantized(T, D, "cpu")
    quantize_ref(x.cpu(), same)
    assert torch.equal(quantized.q.cpu(), same.q)
    assert torch.equal(quantized.meta.cpu(), same.meta)


def test_head_read_without_inject(triton_device: torch.device) -> None:
    r = {name: value.to(triton_device) for name, value in read(torch.bfloat16).items()}
    lo = torch.full_like(r["lo"], float("nan"))
    gpu.down(r["xn"], weight(r["down"]), None, C, lo, None)
    torch.testing.assert_close(lo, r["lo"], rtol=1e-5, atol=1e-5)


def test_kernels_behind_general_products(triton_device: torch.device) -> None:
    r = {name: value.to(triton_device) for name, value in read(torch.float32).items()}
    lo, coeff, x = (torch.full_like(r[name], float("nan")) for name in ("lo", "coeff", "x"))
    both = torch.cat([r["down"], r["inject"]])
    y = (r["xn"].double() @ both.double().t()).float()
    gpu.rank_gate(y, lo, coeff, C)
    torch.testing.assert_close(lo, r["lo"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(coeff, r["coeff"], rtol=1e-5, atol=1e-5)
    alone = torch.full_like(lo, float("nan"))
    gpu.rank_gate(y[:, : lo.shape[1]].contiguous(), alone, None, C)
    torch.testing.assert_close(alone, r["lo"], rtol=1e-5, atol=1e-5)
    quantized = new_quantized(T, D, triton_device)
    gpu.mix(r["gate"], r["xn"], C, x, quantized)
    torch.testing.assert_close(x, r["x"], rtol=1e-5, atol=1e-5)
    same = new_quantized(T, D, "cpu")
    quantize_ref(x.cpu(), same)
    assert torch.equal(quantized.q.cpu(), same.q)


def test_a_token_alone_has_the_same_bits(triton_device: torch.device) -> None:
    r = {name: value.to(triton_device) for name, value in read(torch.bfloat16).items()}
    lo, coeff, x = (torch.empty_like(r[name]) for name in ("lo", "coeff", "x"))
    gpu.down(r["xn"], weight(r["down"]), weight(r["inject"]), C, lo, coeff)
    gpu.up_mix(lo, weight(r["up"]), r["xn"], C, x)
    for t in range(T):
        xn = r["xn"][t : t + 1]
        lo_1, coeff_1, x_1 = (torch.empty_like(v[:1]) for v in (lo, coeff, x))
        gpu.down(xn, weight(r["down"]), weight(r["inject"]), C, lo_1, coeff_1)
        gpu.up_mix(lo_1, weight(r["up"]), xn, C, x_1)
        assert torch.equal(lo_1[0], lo[t])
        assert torch.equal(coeff_1[0], coeff[t])
        assert torch.equal(x_1[0], x[t])


@pytest.mark.parametrize("head", [False, True])
def test_one_launch_has_the_bits_of_three(triton_device: torch.device, head: bool) -> None:
    """A few times with the same counters, which are zero again. On a GPU at a width where the two
    norms sum in the same order; the interpreter sums in one order at any width."""
    c, d, rank = (4, 2560, 320) if triton_device.type == "cuda" else (C, D, R)
    assert is_wide(d) == (triton_device.type == "cuda")
    down, inject, up = (
        weight((rand(seed, *shape) * 0.02).bfloat16().to(triton_device))
        for seed, shape in ((1, (rank, c * d)), (2, (c, c * d)), (3, (c * d, rank)))
    )
    norm = rand(4, c * d).to(triton_device)
    weights = StreamWeights(norm, down, None if head else inject, up, 1e-6)
    turns = new_turns(triton_device)
    assert is_plain(weights)
    for step in range(3):
        streams, out, out_coeff = (
            rand(10 * step + i, 1, *shape).to(triton_device)
            for i, shape in enumerate(((c, d), (d,), (c,)))
        )
        pending = None if step == 1 else Pending(out, out_coeff, norm[:d] if step == 2 else None)
        found = []
        for at_once in (False, True):
            residual = streams.clone()
            xn, lo, x = (
                torch.full((1, k), float("nan")).to(triton_device) for k in (c * d, rank, d)
            )
            coeff = None if head else torch.full((1, c), float("nan")).to(triton_device)
            q = new_quantized(1, d, triton_device)
            if at_once:
                read_at_once(weights, residual, pending, xn, lo, coeff, x, q, turns)
            else:
                add_norm(residual, norm, 1e-6, xn, pending=pending)
                gpu.down(xn, down, weights.inject, c, lo, coeff)
                gpu.up_mix(lo, up, xn, c, x, q)
            found.append([v for v in (residual, xn, lo, x, coeff, q.q, q.meta) if v is not None])
        for three, one in zip(*found, strict=True):
            assert torch.equal(three, one)
        assert torch.isfinite(found[1][3]).all() and not turns.any()
