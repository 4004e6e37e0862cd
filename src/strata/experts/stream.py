"""All experts of one layer after another in the device's memory, while a prompt is read.

Cached experts stay where they are; the others are copied from RAM into one of two buffers, the next
layer's while this layer computes. Some may wait until the layer's routing is known (``bring``).
Copies run on a stream of their own; nothing waits on the host. Knows no steps. Without a GPU
(Triton's interpreter) experts are read where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def first_missing(missing_E: npt.NDArray[np.bool_], share: float) -> npt.NDArray[np.bool_]:
    """The first of the missing experts: a share of them, rounded. They make long runs."""
    missing = np.flatnonzero(missing_E)
    found = np.zeros(len(missing_E), dtype=np.bool_)
    found[missing[: round(share * len(missing))]] = True
    return found


@dataclass(frozen=True)
class Span:
    """Two moments of a stream."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    def seconds(self) -> float:
        """Between them, when both have passed."""
        ms: float = self.begin.elapsed_time(self.end)
        return 1e-3 * ms


def new_span() -> Span:
    """Two events that tell the time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return Span(begin, end)


class LayerStream:
    """Two buffers, each as large as the largest layer, made at first use."""

    def __init__(self, store: ExpertStore, tier: FastTier, device: torch.device) -> None:
        self._store, self._tier, self._device = store, tier, device
        self._compiled = device.type == "cuda"
        self._routed = [i for i, layer in enumerate(store.layers) if layer is not None]
        self._memory: list[torch.Tensor] = []
        self._spans: dict[int, tuple[Span, Span]] = {}
        self._used: list[torch.cuda.Event] = []
        self._queue: torch.cuda.Stream | None = None
        self._none_L = [np.zeros(len(a), dtype=np.bool_) for a in tier.address_LE]
        self.open_LE = self._none_L
        """Experts neither cached nor copied ahead, bool [E] each: ``bring`` says which come."""
        self._split = False
        self._brought = -1

    @property
    def routed(self) -> list[int]:
        """Layers with routed experts."""
        return self._routed

    def expert_bytes(self, layer: int) -> int:
        """Of one expert as it lies in RAM."""
        return self._layer(layer).stride_bytes

    def missing(self, layer: int) -> npt.NDArray[np.bool_]:
        """Experts that are not cached, bool [E]."""
        missing: npt.NDArray[np.bool_] = self._tier.address_LE[layer] == 0
        return missing

    def begin(self, ahead: float = 1.0) -> list[npt.NDArray[np.int64]]:
        """Start a prompt: address of every expert of every layer, int64 [E] each, which holds while
        its layer is current. The first copies are on their way.

        ahead: of a layer's experts that are not cached, so many are copied unasked, one layer in
        front; the others are open until ``bring``. 1: all, two layers in front."""
        if self._compiled and not self._memory:
            self._allocate()
        self._split = ahead < 1
        self._brought = -1
        self.open_LE = self._none_L
        if self._split:
            self.open_LE = [
                missing & ~first_missing(missing, ahead)
                for missing in (self.missing(i) for i in range(len(self._store.layers)))
            ]
        tables = [self._addresses(layer) for layer in range(len(self._store.layers))]
        for layer in self._routed[: 1 if self._split else BUFFERS]:
            self._copy(layer, self.missing(layer) & ~self.open_LE[layer], first=True)
        return tables

    def bring(self, layer: int, chosen_E: npt.NDArray[np.bool_]) -> None:
        """Of the layer's open experts copy these; behind them, what comes unasked of the next."""
        if not self._split:
            return
        self._brought = layer
        self._copy(layer, chosen_E & self.open_LE[layer], first=False)
        later = self._routed.index(layer) + 1
        if later < len(self._routed):
            after = self._routed[later]
            self._copy(after, self.missing(after) & ~self.open_LE[after], first=True)

    def enter(self, layer: int) -> None:
        """From here on the current stream reads the layer's experts."""
        assert not self._split or self._brought == layer, "open experts are not on their way"
        if self._compiled and layer in self._routed:
            last = self._spans[layer][1 if self._split else 0].end
            torch.cuda.current_stream().wait_event(last)

    def leave(self, layer: int) -> None:
        """What was enqueued is all that reads the layer; its buffer goes to a later one."""
        if not self._compiled or layer not in self._routed:
            return
        self._used[self._buffer(layer)].record(torch.cuda.current_stream())
        later = self._routed.index(layer) + BUFFERS
        if later < len(self._routed) and not self._split:
            after = self._routed[later]
            self._copy(after, self.missing(after), first=True)

    def copy_seconds(self, layer: int) -> float:
        """How long the layer's copies of the last prompt took; once they have ended."""
        return sum(span.seconds() for span in self._spans[layer][: 2 if self._split else 1])

    def bytes_per_second(self) -> float:
        """Of the link, by copies that nothing else needs; waits for them."""
        if not self._compiled:
            return 1e12
        if not self._memory:
            self._allocate()
        assert self._queue is not None
        layer = self._routed[0]
        some = first_missing(np.ones(self._layer(layer).n_experts, dtype=np.bool_), 0.25)
        for _ in range(2):
            self._copy(layer, some, first=True)
        self._queue.synchronize()
        return int(some.sum()) * self._layer(layer).stride_bytes / self._spans[layer][0].seconds()

    def _allocate(self) -> None:
        size = stream_bytes(self._store) // BUFFERS
        self._queue = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for _ in range(BUFFERS):
            self._memory.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._used.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        for layer in self._routed:
            self._spans[layer] = new_span(), new_span()

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
        return staged

    def _copy(self, layer: int, chosen_E: npt.NDArray[np.bool_], first: bool) -> None:
        if not self._compiled:
            return
        assert self._queue is not None
        experts, slot = self._layer(layer), self._buffer(layer)
        to = self._memory[slot][: experts.n_bytes].view(experts.blobs.shape)
        span = self._spans[layer][0 if first else 1]
        with torch.cuda.stream(self._queue):
            if first:
                self._queue.wait_event(self._used[slot])
            span.begin.record(self._queue)
            for start, end in runs_of(chosen_E):
                to[start:end].copy_(experts.blobs[start:end], non_blocking=True)
            span.end.record(self._queue)
