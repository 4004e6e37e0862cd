"""Activations on the GPU as kernels want them: f32 rows, and beside them their int8 form.

Knows no models. The int8 form is made by the kernel that makes the rows; a width that is not whole
blocks of 32 has none, and then no quantized matrix of that width exists either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.triton import linear
from strata.kernels.numerics import BLOCK
from strata.kernels.quantize.ref import N_SEGMENTS, Quantized, segment_blocks
from strata.kernels.quantize.triton import quantize
from strata.memory.frame import BufferSpec, Frame


@dataclass(frozen=True)
class Rows:
    """x f32 [T, K], contiguous, and the same rows as int8 (None: the width has no int8 form)."""

    x: torch.Tensor
    q: Quantized | None


def row_specs(name: str, width: int) -> dict[str, BufferSpec]:
    """Buffers of rows of that width: ``name`` and, where it has an int8 form, two more."""
    found = {name: BufferSpec((width,), torch.float32)}
    if width % BLOCK == 0:
        slots = segment_blocks(width) * N_SEGMENTS
        found[f"{name}.q"] = BufferSpec((slots, BLOCK), torch.int8)
        found[f"{name}.meta"] = BufferSpec((slots, 2), torch.int32)
    return found


def rows_of(frame: Frame, name: str) -> Rows:
    """The rows of that name in a frame."""
    x = frame[name]
    if f"{name}.q" not in frame.tensors():
        return Rows(x, None)
    return Rows(x, Quantized(x.shape[1], frame[f"{name}.q"], frame[f"{name}.meta"]))


def products(
    weights: Sequence[GpuWeight], rows: Rows, outs: Sequence[torch.Tensor], *, fresh: bool = True
) -> None:
    """outs[i] = weights[i] times the rows. One launch (two when the int8 form must be made first).

    fresh: the kernel that made the rows also made their int8 form.
    """
    tiles = any(w.is_tiles for w in weights)
    if tiles and not fresh:
        assert rows.q is not None, "tiles need whole blocks of 32"
        quantize(rows.x, rows.q)
    linear(weights, outs, rows.x, rows.q if tiles else None)
