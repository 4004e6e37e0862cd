"""All routed experts of a model: one contiguous blob per expert in RAM, the same bytes wherever
they are read, or (``experts.mapped``) matrices that stay in the file.

Knows no attention, no residual and no places. The blob is [gate | up | down | biases | scales] as
``kernels.expert_rows.ExpertShape`` lays it out.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.kernels.expert_rows import ExpertShape

Progress = Callable[[str, int, int], None]
"""(phase, bytes done, bytes in all)"""

BLOB_ALIGN = 256


class Layer(Protocol):
    """Experts of one layer, wherever they lie."""

    @property
    def shape(self) -> ExpertShape:
        """Layout of a blob."""
        ...

    @property
    def n_experts(self) -> int:
        """Routed experts of this layer."""
        ...

    @property
    def n_bytes(self) -> int:
        """RAM taken."""
        ...

    def addresses(self) -> npt.NDArray[np.int64]:
        """What the pool reads: int64 [E], address of each blob, or [E, 4] for experts in pieces."""
        ...

    def blob(self, expert: int) -> torch.Tensor:
        """One expert's bytes, uint8 [blob_bytes]: a view, or a copy put together."""
        ...

    def will_need(self, expert_G: npt.NDArray[np.int32]) -> None:
        """These experts are about to be read."""
        ...


@dataclass(frozen=True)
class ExpertLayer:
    """Experts of one layer in RAM: blob e starts at base + e * stride_bytes."""

    shape: ExpertShape
    stride_bytes: int
    blobs: torch.Tensor
    """uint8 [E, stride_bytes]"""

    @property
    def n_experts(self) -> int:
        """Routed experts of this layer."""
        return int(self.blobs.shape[0])

    def addresses(self) -> npt.NDArray[np.int64]:
        """Address of each blob, int64 [E]."""
        base = self.blobs.data_ptr()
        return base + np.arange(self.n_experts, dtype=np.int64) * self.stride_bytes

    @property
    def n_bytes(self) -> int:
        """RAM taken."""
        return self.blobs.numel()

    def blob(self, expert: int) -> torch.Tensor:
        """One expert's bytes, uint8 [blob_bytes]."""
        return self.blobs[expert, : self.shape.blob_bytes]

    def will_need(self, expert_G: npt.NDArray[np.int32]) -> None:
        """Nothing: they are there."""


def stride_of(shape: ExpertShape) -> int:
    """Bytes from one expert's blob to the next."""
    return -(-shape.blob_bytes // BLOB_ALIGN) * BLOB_ALIGN


def store_bytes(shapes: Sequence[tuple[ExpertShape, int] | None]) -> int:
    """RAM for all experts, from (shape, number of experts) per layer; None = a layer without routed
    experts."""
    return sum(stride_of(shape) * n for shape, n in (s for s in shapes if s is not None))


class ExpertStore:
    """Experts of every layer. ``layers[l]`` is None where the layer has no routed experts."""

    def __init__(self, layers: Sequence[Layer | None]) -> None:
        self.layers = tuple(layers)

    @property
    def n_bytes(self) -> int:
        """RAM taken."""
        return sum(layer.n_bytes for layer in self.layers if layer is not None)

    def layer(self, index: int) -> Layer:
        """The experts of a layer that has some."""
        layer = self.layers[index]
        assert layer is not None, f"layer {index} has no routed experts"
        return layer

    def blob(self, layer: int, expert: int) -> torch.Tensor:
        """One expert's bytes, uint8 [blob_bytes]."""
        return self.layer(layer).blob(expert)


def anonymous(n_bytes: int) -> torch.Tensor:
    """Zeroed page-aligned memory outside any allocator, huge pages where the system grants them;
    uint8 [n_bytes]."""
    if n_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # private: shared memory would get no huge pages and count against the system's limit for it
    area = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and n_bytes >= 1 << 22:
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)
