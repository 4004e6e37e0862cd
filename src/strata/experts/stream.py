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


def left_out(missing_E: npt.NDArray[np.bool_], share: float) -> npt.NDArray[np.bool_]:
    """The last of the missing experts: a share of them, rounded. The others keep long runs."""
    missing = np.flatnonzero(missing_E)
    found = np.zeros(len(missing_E), dtype=np.bool_)
    found[missing[len(missing) - round(share * len(missing)) :]] = True
    return found


class LayerStream:
    """Two buffers, each as large as the largest layer, made at first use."""

    def __init__(self, store: ExpertStore, tier: FastTier, device: torch.device) -> None:
        self._store, self._tier, self._device = store, tier, device
        self._compiled = device.type == "cuda"
        self._routed = [i for i, layer in enumerate(store.layers) if layer is not None]
        self._memory: list[torch.Tensor] = []
        self._begun: dict[int, torch.cuda.Event] = {}
        self._copied: dict[int, torch.cuda.Event] = {}
        self._used: list[torch.cuda.Event] = []
        self._queue: torch.cuda.Stream | None = None
        self.host_LE = [np.zeros(len(a), dtype=np.bool_) for a in tier.address_LE]
        """Experts that are not copied and not cached: somebody else's."""

    def begin(self, host_share: float = 0.0) -> list[npt.NDArray[np.int64]]:
        """Start a prompt: address of every expert of every layer, int64 [E] each, which holds while
        its layer is current. The first copies are on their way.

        host_share: of a layer's experts that are not cached, so many are not copied; their address
        is 0, and ``host_LE`` (bool [E] each) says which they are."""
        if self._compiled and not self._memory:
            self._allocate()
        self.host_LE = [left_out(cached == 0, host_share) for cached in self._tier.address_LE]
        tables = []
        for layer in range(len(self._store.layers)):
            tables.append(self._addresses(layer))
        for layer in self._routed[:BUFFERS]:
            self._copy(layer)
        return tables

    def enter(self, layer: int) -> None:
        """From here on the current stream reads the layer's experts."""
        if self._compiled and layer in self._routed:
            torch.cuda.current_stream().wait_event(self._copied[layer])

    def leave(self, layer: int) -> None:
        """What was enqueued is all that reads the layer; its buffer goes to a later one."""
        if not self._compiled or layer not in self._routed:
            return
        self._used[self._buffer(layer)].record(torch.cuda.current_stream())
        later = self._routed.index(layer) + BUFFERS
        if later < len(self._routed):
            self._copy(self._routed[later])

    def copy_seconds(self) -> list[float]:
        """How long each layer's copies of the last prompt took; once they have ended."""
        return [1e-3 * self._begun[i].elapsed_time(self._copied[i]) for i in self._copied]

    def _allocate(self) -> None:
        size = stream_bytes(self._store) // BUFFERS
        self._queue = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for _ in range(BUFFERS):
            self._memory.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._used.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        for layer in self._routed:
            for events in (self._begun, self._copied):
                events[layer] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

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
        staged = experts.addresses()
        if self._compiled:
            base = self._memory[self._buffer(layer)].data_ptr()
            staged = base + np.arange(experts.n_experts, dtype=np.int64) * experts.stride_bytes
            staged = np.where(cached != 0, cached, staged)
        return np.where(self.host_LE[layer], 0, staged)

    def _copy(self, layer: int) -> None:
        if not self._compiled:
            return
        assert self._queue is not None
        experts, slot = self._layer(layer), self._buffer(layer)
        to = self._memory[slot][: experts.n_bytes].view(experts.blobs.shape)
        with torch.cuda.stream(self._queue):
            self._queue.wait_event(self._used[slot])
            self._begun[layer].record(self._queue)
            for first, end in runs_of((self._tier.address_LE[layer] == 0) & ~self.host_LE[layer]):
                to[first:end].copy_(experts.blobs[first:end], non_blocking=True)
            self._copied[layer].record(self._queue)
