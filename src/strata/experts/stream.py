"""All experts of one layer after another in the device's memory, while a prompt is read.

Cached experts stay where they are; the others are copied from RAM into one of two buffers, the next
layer's while this layer computes. Copies run on a stream of their own; nothing waits on the host.
Knows no steps. Without a GPU (Triton's interpreter) experts are read where they lie.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from strata.experts.fast_tier import FastTier
from strata.experts.store import ExpertLayer, ExpertStore

BUFFERS = 2
STAGE_BYTES = 64 << 20
"""Room for experts that a window reads over the link (``link_stage``): 20 or more of 3 MB. Those
beyond it are read where they lie."""


def stream_bytes(store: ExpertStore) -> int:
    """Device memory that streaming takes."""
    return BUFFERS * max((layer.n_bytes for layer in store.layers if layer is not None), default=0)


def runs_of(missing_E: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Maximal ranges [first, end) of missing experts."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing_E.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


class LayerStream:
    """Two buffers, each as large as the largest layer, made at first use."""

    def __init__(self, store: ExpertStore, tier: FastTier, device: torch.device) -> None:
        self._store, self._tier, self._device = store, tier, device
        self._compiled = device.type == "cuda"
        self._routed = [i for i, layer in enumerate(store.layers) if layer is not None]
        self._memory: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []
        self._queue: torch.cuda.Stream | None = None

    def begin(self) -> list[npt.NDArray[np.int64]]:
        """Start a prompt: address of every expert of every layer, int64 [E] each, which holds while
        its layer is current. The first copies are on their way."""
        if self._compiled and not self._memory:
            self._allocate()
        tables = []
        for layer in range(len(self._store.layers)):
            tables.append(self._addresses(layer))
        for layer in self._routed[:BUFFERS]:
            self._copy(layer)
        return tables

    def enter(self, layer: int) -> None:
        """From here on the current stream reads the layer's experts."""
        if self._compiled and layer in self._routed:
            torch.cuda.current_stream().wait_event(self._copied[self._buffer(layer)])

    def leave(self, layer: int) -> None:
        """What was enqueued is all that reads the layer; its buffer goes to a later one."""
        if not self._compiled or layer not in self._routed:
            return
        self._used[self._buffer(layer)].record(torch.cuda.current_stream())
        later = self._routed.index(layer) + BUFFERS
        if later < len(self._routed):
            self._copy(self._routed[later])

    def _allocate(self) -> None:
        size = stream_bytes(self._store) // BUFFERS
        self._queue = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for _ in range(BUFFERS):
            self._memory.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._used.append(torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _buffer(self, layer: int) -> int:
        return self._routed.index(layer) % BUFFERS

    def _layer(self, layer: int) -> ExpertLayer:
        found = self._store.layer(layer)
        assert isinstance(found, ExpertLayer), "experts that stay on disk cannot be streamed"
        return found

    def _addresses(self, layer: int) -> npt.NDArray[np.int64]:
        cached = self._tier.address_LE[layer]
        if layer not in self._routed:
            return cached
        experts = self._layer(layer)
        if not self._compiled:
            return experts.addresses()
        base = self._memory[self._buffer(layer)].data_ptr()
        staged = base + np.arange(experts.n_experts, dtype=np.int64) * experts.stride_bytes
        return np.where(cached != 0, cached, staged)

    def _copy(self, layer: int) -> None:
        if not self._compiled:
            return
        assert self._queue is not None
        experts, slot = self._layer(layer), self._buffer(layer)
        to = self._memory[slot][: experts.n_bytes].view(experts.blobs.shape)
        with torch.cuda.stream(self._queue):
            self._queue.wait_event(self._used[slot])
            for first, end in runs_of(self._tier.address_LE[layer] == 0):
                to[first:end].copy_(experts.blobs[first:end], non_blocking=True)
            self._copied[slot].record(self._queue)
