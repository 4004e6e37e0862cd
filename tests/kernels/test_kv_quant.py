"""Encoded keys and values: stated error, extremes, packing."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.kv_quant import bits_of, decode, encode, group_of


@pytest.mark.parametrize(
    ("bits", "dim", "group"), [(8, 128, 128), (8, 96, 32), (4, 64, 32), (4, 40, 8)]
)
def test_error_is_half_a_step(bits: int, dim: int, group: int) -> None:
    """Expectation: half a step of the stored scale, plus the f16 rounding of scale and product."""
    assert group_of(bits, dim) == group
    x = torch.randn(50, 2, dim, generator=torch.Generator().manual_seed(dim))
    codes, scale = encode(x, bits, group)
    assert codes.numel() * codes.element_size() == x.numel() * bits // 8
    assert bits_of(codes.dtype) == bits and scale.shape == (50, 2, dim // group)
    far = x.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True)
    # of 4 bits the side opposite to the farthest number ends at 7 steps
    step = far / 127 if bits == 8 else far / 8
    room = 0.51 if bits == 8 else 1.01
    error = (decode(codes, scale).float() - x).unflatten(-1, (-1, group)).abs()
    assert (error <= step * room + far * 2.0**-10).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_extremes(bits: int) -> None:
    """Zeros stay zeros; a NaN or infinity makes its own group NaN."""
    x = torch.ones(4, 32)
    x[0] = 0
    x[1, 3], x[2, 4] = float("nan"), float("-inf")
    back = decode(*encode(x, bits, 16))
    assert (back[0] == 0).all() and (back[3] == 1).all()
    for row in (1, 2):
        assert back[row, :16].isnan().all() and (back[row, 16:] == 1).all()


def test_four_bits_by_hand() -> None:
    """-8 steps is the farthest; dims 2 i and 2 i + 1 share a byte."""
    x = torch.tensor([[-2.0, 1.75, 0.25, 0.0]])
    codes, scale = encode(x, 4, 4)
    assert scale.tolist() == [[0.25]]
    assert codes.tolist() == [[0 | 15 << 4, 9 | 8 << 4]]
    assert decode(codes, scale).tolist() == x.tolist()
