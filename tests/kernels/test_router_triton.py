"""Routing on the device against kernels/router."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.router import route as route_ref
from strata.kernels.router.triton import route

CASES = {
    "softmax": {"scoring": "softmax", "normalize": True, "scale": 1.5},
    "softmax_all": {"scoring": "softmax", "normalize": False},
    "softmax_topk": {"scoring": "softmax_topk", "normalize": False},
    "sigmoid": {"scoring": "sigmoid", "normalize": True, "scale": 2.5},
    "groups": {"scoring": "sigmoid", "normalize": True, "n_groups": 4, "groups_kept": 2},
}


def device_route(
    logits: torch.Tensor, device: torch.device, n_active: int, **rule: object
) -> tuple[torch.Tensor, torch.Tensor]:
    n_rows = len(logits) * n_active
    expert = torch.full((n_rows,), -1, dtype=torch.int32, device=device)
    weight = torch.full((n_rows,), float("nan"), device=device)
    rule = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in rule.items()}
    route(logits.to(device), expert, weight, n_active=n_active, **rule)
    return expert.cpu().view(-1, n_active), weight.cpu().view(-1, n_active)


@pytest.mark.parametrize("name", CASES)
def test_rules(triton_device: torch.device, name: str) -> None:
    """3 tokens of 16 experts (12 where no groups need a power of two), many ties."""
    rule, n_experts = CASES[name], 16 if name == "groups" else 12
    make = torch.Generator().manual_seed(3)
    logits = (torch.randn(3, n_experts, generator=make) * 4).round() / 2
    if rule["scoring"] == "sigmoid":
        rule = rule | {"correction_E": torch.randn(n_experts, generator=make)}
    expert, weight = device_route(logits, triton_device, 3, **rule)
    expected, expected_weight = route_ref(logits, n_active=3, **rule)
    assert torch.equal(expert, expected)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-6, atol=1e-7)
    for t in range(3):
        alone = device_route(logits[t : t + 1], triton_device, 3, **rule)
        assert torch.equal(alone[0][0], expert[t])
        assert torch.equal(alone[1][0], weight[t])


def test_signed_zeros_are_ties_and_bias_joins(triton_device: torch.device) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0], [3.0, 2.0, 1.0, 0.0]])
    rule = {"scoring": "softmax", "normalize": True}
    expert, _ = device_route(logits, triton_device, 3, **rule)
    assert expert.tolist() == [[1, 2, 3], [0, 1, 2]]
    bias = torch.tensor([0.0, 0.0, 9.0, 4.0])
    expert, weight = device_route(logits, triton_device, 2, bias_E=bias, **rule)
    expected, expected_weight = route_ref(logits + bias, n_active=2, **rule)
    assert torch.equal(expert, expected)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-6, atol=1e-7)


def test_nan_gives_nan_weights_and_valid_experts(triton_device: torch.device) -> None:
    logits = torch.tensor([[1.0, float("nan"), 0.0, 2.0]])
    expert, weight = device_route(logits, triton_device, 2, scoring="softmax", normalize=True)
    assert sorted(set(expert[0].tolist()) & set(range(4))) == sorted(expert[0].tolist())
    assert weight.isnan().all()
