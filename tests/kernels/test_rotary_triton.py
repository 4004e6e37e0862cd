"""rotary on the device against kernels/rotary, near and far positions, both pairings."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.rotary import rotary as rotary_ref
from strata.kernels.rotary.triton import rotary, rotary_table
from strata.models.spec import RotarySpec


@pytest.mark.parametrize("pairing", ["half", "pairs"])
@pytest.mark.parametrize("dim", [16, 24])
def test_rotary(triton_device: torch.device, pairing: str, dim: int) -> None:
    spec = RotarySpec(tuple(0.3**i for i in range(8)), pairing, 1.2)
    x = torch.randn(4, 2, dim, generator=torch.Generator().manual_seed(0))
    pos = torch.tensor([0, 1, 4097, 262143])
    expected = rotary_ref(x.double(), pos, spec).float()
    y = x.clone().to(triton_device)
    rotary(y, pos.int().to(triton_device), rotary_table(spec, triton_device))
    torch.testing.assert_close(y.cpu(), expected, rtol=2e-6, atol=2e-6)
