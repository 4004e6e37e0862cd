"""The combine kernel against ``kernels.combine`` in torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from strata.core.types import Place
from strata.kernels.combine import combine
from strata.kernels.combine.triton import ON_TIME
from strata.kernels.combine.triton import combine as combine_triton
from strata.kernels.hyper import write


def data(n_tokens, n_active, d_model, device, seed=0):
    """rows, weights, shared: f32, on the CPU and on the device."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((n_tokens * n_active, d_model), (n_tokens * n_active,), (n_tokens, d_model))
    host = [torch.randn(shape, generator=make) for shape in shapes]
    return host, [x.to(device) for x in host]


@pytest.mark.parametrize("with_shared", [False, True])
def test_plain_sum(with_shared, triton_device):
    """Expectation: ref.combine; a width that is not whole blocks."""
    (rows, weight, shared), (rows_d, weight_d, shared_d) = data(3, 4, 150, triton_device)
    out = torch.full((3, 150), float("nan"), device=triton_device)
    combine_triton(rows_d, weight_d, 3, shared_TD=shared_d if with_shared else None, out_TD=out)
    expected = combine(rows, weight.view(3, 4), shared_TD=shared if with_shared else None)
    assert torch.equal(out.cpu(), expected)


def test_places(triton_device):
    """Skipped and late rows do not matter (they hold NaN); CPU rows come from the host's."""
    (rows, weight, _), _ = data(2, 6, 40, triton_device)
    place = torch.tensor([int(p) for p in Place] * 2, dtype=torch.int8)
    on_time = torch.tensor([Place(int(p)) in ON_TIME for p in place])
    expected = combine(rows, weight.view(2, 6), on_time)
    by_host = place == int(Place.CPU)
    mine, hosts = rows.clone(), torch.full_like(rows, float("nan"))
    mine[~on_time | by_host] = float("nan")
    hosts[by_host] = rows[by_host]
    hosts = hosts.to(triton_device)
    out = torch.empty(2, 40, device=triton_device)
    combine_triton(
        mine.to(triton_device), weight.to(triton_device), 2, place_R=place.to(triton_device),
        cpu_rows=hosts.data_ptr(), out_TD=out,
    )  # fmt: skip
    assert torch.equal(out.cpu(), expected)


def test_late_rows_alone(triton_device):
    """With places=(CPU_LATE,) the sum has only late rows, read from the host's buffer."""
    (rows, weight, _), (_, weight_d, _) = data(1, 3, 40, triton_device)
    place = torch.tensor([0, 3, 3], dtype=torch.int8)
    late = rows.to(triton_device)
    out = torch.empty(1, 40, device=triton_device)
    combine_triton(
        torch.full_like(late, float("nan")), weight_d, 1, place_R=place.to(triton_device),
        places=(Place.CPU_LATE,), cpu_rows=late.data_ptr(), out_TD=out,
    )  # fmt: skip
    assert torch.equal(out.cpu(), combine(rows, weight.view(1, 3), place == 3))


def test_into_plain_residual(triton_device):
    """residual + sum, one addition; no other output is needed."""
    (rows, weight, shared), (rows_d, weight_d, shared_d) = data(2, 3, 128, triton_device)
    residual = shared_d + 1
    combine_triton(rows_d, weight_d, 2, shared_TD=shared_d, residual=residual)
    expected = (shared + 1) + combine(rows, weight.view(2, 3), shared_TD=shared)
    assert torch.equal(residual.cpu(), expected)


def test_into_streams(triton_device):
    """Expectation: kernels.hyper.write of the sum."""
    (rows, weight, _), (rows_d, weight_d, _) = data(2, 3, 64, triton_device)
    streams, coeff = torch.randn(2, 4, 64), torch.rand(2, 4)
    got, out = streams.to(triton_device), torch.empty(2, 64, device=triton_device)
    combine_triton(rows_d, weight_d, 2, out_TD=out, residual=got, coeff_TC=coeff.to(triton_device))
    expected = combine(rows, weight.view(2, 3))
    write(streams, expected, coeff)
    assert torch.equal(out.cpu(), expected) and torch.equal(got.cpu(), streams)


def test_gated_shared(triton_device):
    """shared is multiplied by the sigmoid of its gate (torch's, within rounding)."""
    (rows, weight, shared), (rows_d, weight_d, shared_d) = data(2, 1, 64, triton_device)
    logits = torch.tensor([-3.0, 0.5])
    out = torch.empty(2, 64, device=triton_device)
    combine_triton(
        rows_d, weight_d, 2, shared_TD=shared_d, shared_gate_T=logits.to(triton_device), out_TD=out
    )
    expected = combine(rows, weight.view(2, 1), shared_TD=torch.sigmoid(logits)[:, None] * shared)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
