"""Int8 activations in their slots, in NumPy; the layout is in the package docstring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from strata.kernels.numerics import BLOCK, group_sums, quantize_activations

N_SEGMENTS = 8
"""Segments of a row (contract 3)."""


@dataclass(frozen=True)
class Quantized:
    """Rows of int8 activations.

    n_cols: K, a multiple of 32. q: int8 [T, slots, 32]. meta: int32 [T, slots, 2]. Both contiguous.
    """

    n_cols: int
    q: torch.Tensor
    meta: torch.Tensor

    @property
    def n_rows(self) -> int:
        """T."""
        return len(self.q)

    def first(self, n_rows: int) -> Quantized:
        """The first rows, sharing memory."""
        return Quantized(self.n_cols, self.q[:n_rows], self.meta[:n_rows])


def segment_blocks(n_cols: int) -> int:
    """Blocks of a segment, L."""
    return -(-(n_cols // BLOCK) // N_SEGMENTS)


def slots_of_blocks(n_cols: int) -> NDArray[np.int64]:
    """Slot of every block, [K / 32]."""
    block = np.arange(n_cols // BLOCK)
    length = segment_blocks(n_cols)
    return block % length * N_SEGMENTS + block // length


def new_quantized(n_rows: int, n_cols: int, device: torch.device | str) -> Quantized:
    """Zeros."""
    assert n_cols % BLOCK == 0, f"{n_cols} columns are not whole blocks of {BLOCK}"
    slots = segment_blocks(n_cols) * N_SEGMENTS
    return Quantized(
        n_cols,
        torch.zeros((n_rows, slots, BLOCK), dtype=torch.int8, device=device),
        torch.zeros((n_rows, slots, 2), dtype=torch.int32, device=device),
    )


def quantize(x_TK: torch.Tensor, out: Quantized) -> None:
    """Fill the first T rows of ``out`` (on the CPU) from x f32 [T, K]."""
    n_tokens, n_cols = x_TK.shape
    assert n_cols == out.n_cols and n_tokens <= out.n_rows, (tuple(x_TK.shape), out.q.shape)
    q_TK, scale_TB = quantize_activations(x_TK.numpy())
    slots = slots_of_blocks(n_cols)
    half_TB2 = group_sums(q_TK, BLOCK // 2).reshape(n_tokens, -1, 2)
    sums_TB = (half_TB2[:, :, 0] & 0xFFFF) | half_TB2[:, :, 1] << 16
    out.q[:n_tokens, slots] = torch.from_numpy(q_TK.reshape(n_tokens, -1, BLOCK))
    meta_TB2 = np.stack((scale_TB.view(np.int32), sums_TB), axis=2)
    out.meta[:n_tokens, slots] = torch.from_numpy(meta_TB2)
