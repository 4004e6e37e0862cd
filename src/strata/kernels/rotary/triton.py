# mypy: allow-untyped-defs, allow-untyped-decorators
"""Rotary embedding as device functions for kernels that make queries and keys, and by itself.

Angles are reduced to half a turn in f64 and only then become f32, so they are as good at position
262,143 as at 1; cos and sin are f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.rotary.ref import RotaryLike
from strata.kernels.triton_common import EXACT

_TURN = tl.constexpr(2 * math.pi)


@dataclass(frozen=True)
class RotaryTable:
    """A RotarySpec on the device. turns_n: f64 [n], turns per position of each rotated pair."""

    turns_n: torch.Tensor
    pairs: bool
    factor: float

    @property
    def n(self) -> int:
        """Rotated pairs."""
        return len(self.turns_n)


def rotary_table(spec: RotaryLike, device: torch.device | str) -> RotaryTable:
    """The spec for kernels."""
    turns = torch.tensor(spec.inv_freq, dtype=torch.float64) / (2 * math.pi)
    return RotaryTable(turns.to(device), spec.pairing == "pairs", spec.attention_factor)


@triton.jit
def partner_of(i, N: tl.constexpr, PAIRS: tl.constexpr):
    """The dim that dim i rotates with; itself from 2 N on."""
    j = i ^ 1 if PAIRS else tl.where(i < N, i + N, i - N)
    return tl.where(i < 2 * N, j, i)


@triton.jit
def rotated(y, other, i, pos, turns, factor, N: tl.constexpr, PAIRS: tl.constexpr):
    """Dims i of a head at position pos, from their values y and those of their partners."""
    pair = i // 2 if PAIRS else i % N
    turning = i < 2 * N
    turn = pos.to(tl.float64) * tl.load(turns + pair, mask=turning, other=0.0)
    angle = ((turn - tl.floor(turn + 0.5)) * _TURN).to(tl.float32)
    first = i % 2 == 0 if PAIRS else i < N
    sin = tl.sin(angle) * factor
    return tl.where(turning, y * (tl.cos(angle) * factor) + other * tl.where(first, -sin, sin), y)


@triton.jit
def rotary_kernel(
    x, pos, turns, factor, STRIDE, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, h), in place."""
    t = tl.program_id(0)
    head = x + t * STRIDE + tl.program_id(1) * D
    i = tl.arange(0, BLOCK)
    ok = i < D
    y = tl.load(head + i, mask=ok, other=0.0)
    other = tl.load(head + partner_of(i, N, PAIRS), mask=ok, other=0.0)
    y = rotated(y, other, i, tl.load(pos + t), turns, factor, N, PAIRS)
    tl.debug_barrier()  # all partners are read before any is written
    tl.store(head + i, y, mask=ok)


def rotary(x_THd: torch.Tensor, pos_T: torch.Tensor, table: RotaryTable) -> None:
    """Rotate the first 2 n dims of every head by its token's position, in place. One launch.

    x_THd: f32 [T, H, d], each token contiguous. pos_T: int32 [T].
    """
    n_tokens, n_heads, dim = x_THd.shape
    assert x_THd[0].is_contiguous() and dim >= 2 * table.n, (tuple(x_THd.shape), table.n)
    block = triton.next_power_of_2(dim)
    rotary_kernel[(n_tokens, n_heads)](
        x_THd, pos_T, table.turns_n, table.factor, x_THd.stride(0), H=n_heads, D=dim, N=table.n,
        PAIRS=table.pairs, BLOCK=block, num_warps=max(1, min(4, block // 64)), **EXACT,
    )  # fmt: skip
