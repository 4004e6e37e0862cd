"""Plain torch truth of rotary; the contract is in the package docstring."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import Literal, Protocol

import torch

from strata.kernels.rms_norm.ref import rms_norm

TABLE_POSITIONS = 256


class RotaryLike(Protocol):
    """What rotary needs to know; ``models.spec.RotarySpec`` has it."""

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """One per rotated pair, radians per position."""
        ...

    @property
    def pairing(self) -> Literal["half", "pairs"]:
        """Which two dims make a pair."""
        ...

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        ...


@lru_cache(maxsize=128)
def table(
    inv_freq: tuple[float, ...], factor: float, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [256, n], of positions 256 * block and up."""
    first = block * TABLE_POSITIONS
    pos = torch.arange(first, first + TABLE_POSITIONS, dtype=torch.float64)
    angle = pos.unsqueeze(-1) * torch.tensor(inv_freq, dtype=torch.float64)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def cos_sin(
    pos_T: torch.Tensor, spec: RotaryLike, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each [T, n] on pos_T's device."""
    cos: list[torch.Tensor] = []
    sin: list[torch.Tensor] = []
    for block, run in groupby(pos_T.tolist(), lambda p: p // TABLE_POSITIONS):
        rows = torch.tensor([p % TABLE_POSITIONS for p in run])
        table_cos, table_sin = table(spec.inv_freq, spec.attention_factor, block, dtype)
        cos.append(table_cos[rows])
        sin.append(table_sin[rows])
    return torch.cat(cos).to(pos_T.device), torch.cat(sin).to(pos_T.device)


def rotary(x_THd: torch.Tensor, pos_T: torch.Tensor, spec: RotaryLike) -> torch.Tensor:
    """Rotate the first 2 * len(inv_freq) dims of every head by its token's position."""
    n = len(spec.inv_freq)
    if not len(pos_T):
        return x_THd.clone()
    cos, sin = (c.unsqueeze(1) for c in cos_sin(pos_T, spec, x_THd.dtype))
    y = x_THd.clone(memory_format=torch.contiguous_format)
    if spec.pairing == "half":
        a, b = x_THd[..., :n], x_THd[..., n : 2 * n]
        y_a, y_b = y[..., :n], y[..., n : 2 * n]
    else:
        a, b = x_THd[..., 0 : 2 * n : 2], x_THd[..., 1 : 2 * n : 2]
        y_a, y_b = y[..., 0 : 2 * n : 2], y[..., 1 : 2 * n : 2]
    y_a.copy_(a * cos - b * sin)
    y_b.copy_(b * cos + a * sin)
    return y


def head_rotary(
    x_THd: torch.Tensor,
    weight_d: torch.Tensor | None,
    eps: float,
    start: int,
    spec: RotaryLike,
    out_THd: torch.Tensor,
) -> None:
    """out = rotary of (the norm of) every head at positions start and up; None: no norm."""
    if weight_d is not None:
        x_THd = rms_norm(x_THd, weight_d, eps)
    pos_T = torch.arange(start, start + x_THd.shape[0], device=x_THd.device)
    out_THd.copy_(rotary(x_THd, pos_T, spec))
