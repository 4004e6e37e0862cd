"""Encoded keys and values in plain torch; formats and formulas: the package docstring."""

from __future__ import annotations

import torch

_CODES = {8: torch.int8, 4: torch.uint8}
_BYTES = torch.arange(256)
_PAIRS = (torch.stack([_BYTES & 15, _BYTES >> 4], dim=-1) - 8).half().view(torch.int32).flatten()
"""Both numbers of every byte of 4-bit codes: a look-up is several times faster than unpacking."""


def bits_of(dtype: torch.dtype) -> int:
    """Bits a number of a cache of that element type."""
    return {torch.int8: 8, torch.uint8: 4}.get(dtype, 8 * dtype.itemsize)


def group_of(bits: int, dim: int) -> int:
    """Numbers that share a scale in head vectors of that many dims."""
    return min(dim & -dim, 32 if bits == 4 else dim)


def encode(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of f32 head vectors [..., d]."""
    assert bits in _CODES and x.shape[-1] % group == 0, (bits, group, tuple(x.shape))
    parts = x.reshape(*x.shape[:-1], -1, group)
    low, high = parts.amin(-1), parts.amax(-1)
    broken = ~parts.isfinite().all(-1)
    far = (
        torch.maximum(high, -low) / 127 if bits == 8 else torch.where(high >= -low, high, low) / -8
    )
    scale = torch.where(broken, float("nan"), far).half()
    wide = scale.float().unsqueeze(-1)
    usable = (wide != 0) & wide.isfinite()
    ratio = torch.where(usable, parts / torch.where(usable, wide, 1.0), 0.0).round()
    if bits == 8:
        return ratio.clamp(-127, 127).to(torch.int8).flatten(-2), scale
    codes = (ratio + 8).clamp(0, 15).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """f16 [..., d]."""
    if codes.dtype == torch.uint8:
        pairs = _PAIRS.to(codes.device).index_select(0, codes.flatten().int())
        values = pairs.view(torch.float16)
    else:
        values = codes.half()
    # codes are exact in f16, so their product with the scale is rounded once
    return (values.view(*scale.shape, -1) * scale.unsqueeze(-1)).flatten(-2)
