"""A prompt's experts, layer after layer: cached, brought over the link, or computed by the CPU.

Both readers of prompts (``window/device_chunk``, ``window/device_fast``) go through the same calls
a layer: ``begun``, ``routed``, ``start``, ``own_rows``, ``joined``. Knows no steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from strata.core.types import Place
from strata.experts.device_service import DeviceService
from strata.experts.host_rows import HostRows
from strata.experts.prompt_share import Measured, Missed, PromptShare
from strata.experts.stream import LayerStream
from strata.kernels.expert_rows.launch import GpuGroups
from strata.kernels.expert_rows.triton_take import leave_out
from strata.kernels.plan import Groups

MARKS = ("begun", "routed", "computed", "joined")
"""Moments of a layer on the device's main stream: before its mixer, when its routing is known, when
its own rows are there, when the CPU's are."""
TIMED_EXPERTS = 64
LESSONS = 6
"""Chunks whose times are always looked at; later ones only where the device has ended already."""


class LayerClock:
    """When a chunk's layers passed their marks, by the device's own clock."""

    def __init__(self, n_layers: int, compiled: bool) -> None:
        self._events: dict[tuple[int, str], torch.cuda.Event] = {}
        for layer in range(n_layers if compiled else 0):
            for mark in MARKS:
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._events[layer, mark] = event

    def mark(self, layer: int, mark: str) -> None:
        """Here in stream order."""
        event = self._events.get((layer, mark))
        if event is not None:
            event.record(torch.cuda.current_stream())

    def seconds(self, first: tuple[int, str], last: tuple[int, str]) -> float:
        """From one mark to another, when both have passed."""
        ms: float = self._events[first].elapsed_time(self._events[last])
        return 1e-3 * ms


class PromptExperts:
    """share: of the experts outside the device's memory, so many are the CPU's; None: as many as
    make it quickest, by what is measured (with a device only)."""

    def __init__(
        self,
        service: DeviceService,
        stream: LayerStream,
        d_model: int,
        share: float | None = 0.0,
    ) -> None:
        self.service, self.stream = service, stream
        self._compiled = service.device.type == "cuda"
        self.host = HostRows(service, service.device, d_model, service.n_active)
        self.clock = LayerClock(len(service.n_active), self._compiled)
        self._d_model = d_model
        self.policy = PromptShare(self._time_rows, stream.bytes_per_second, share)
        if share is None and not self._compiled:
            self.policy.fixed = 0.0
        self.known: set[tuple[str, int, bool]] = set()
        """(numerics, tokens, whether the CPU had a share) of chunks that were read before: all
        their kernels are loaded."""
        self._known = self._shared = False
        self._kinds: Sequence[Hashable] = ()
        self._seen: set[Hashable] = set()
        self._unlearned: tuple[str, int, bool] | None = None
        self._copied: list[int] = []
        self._lessons = 0

    @contextmanager
    def reading(self, n_tokens: int, numerics: str, kinds: Sequence[Hashable]) -> Iterator[None]:
        """Around a chunk; what it leaves on the device's stream may still run at the end.

        kinds: of each layer; those of one kind launch the same kernels with the same shapes."""
        if self._unlearned is not None and self._may_learn():
            self._learn(*self._unlearned)
        ahead = 1.0
        if self.stream.routed and self.host.fits(n_tokens):
            ahead = self.policy.ahead(numerics, n_tokens, self._missed())
        self._shared = ahead < 1
        self._copied = []
        self.service.show(self.stream.begin(ahead))
        self.host.begin(n_tokens)
        kind = (numerics, n_tokens, self._shared)
        self._known, self._kinds, self._seen = kind in self.known, kinds, set()
        with self.service.without_link():
            try:
                yield
                self.host.settle()
            except BaseException:
                self.host.abandon()
                raise
        if self._compiled and self.stream.routed:
            self._unlearned = numerics, n_tokens, self._known
        self.known.add(kind)

    def begun(self, layer: int) -> None:
        """The layer's mixer follows."""
        self._seen.update(self._kinds[layer - 1 : layer])
        self.clock.mark(layer, "begun")

    def routed(self, layer: int, x_ND: torch.Tensor, groups: GpuGroups) -> None:
        """The layer's routing is known: all rows by expert, of the inputs f32 [N, D]."""
        self.clock.mark(layer, "routed")
        if self._shared:
            self.host.hand(layer, x_ND, groups)

    def start(self, layer: int) -> None:
        """Wait on the host for the routing, let the CPU begin, and bring what it does not take."""
        if not self._shared:
            return
        count_E = self.host.counts()
        missing_E, open_E = self.stream.missing(layer), self.stream.open_LE[layer]
        host_E = self.policy.pick(count_E, missing_E, open_E)
        brought_E = open_E & ~host_E & (count_E > 0)
        taken_E = self.host.start(layer, host_E, lambda: self.stream.bring(layer, brought_E))
        leave_out(taken_E, self.service.shown(layer)[1])
        self._copied.append(int(brought_E.sum()) + int((missing_E & ~open_E).sum()))

    @contextmanager
    def own_rows(self, layer: int) -> Iterator[None]:
        """Around all that reads the layer's experts in the device's memory."""
        self.stream.enter(layer)
        yield
        self.stream.leave(layer)
        self.clock.mark(layer, "computed")

    def joined(self, layer: int, rows_RD: torch.Tensor) -> None:
        """The CPU's rows are in their places of rows_RD f32 [R, D] from here on."""
        if self._shared:
            if not self._may_go_ahead(layer):
                self.host.settle()
            self.host.join(layer, rows_RD)
        self.clock.mark(layer, "joined")

    @property
    def cpu_share(self) -> float:
        """Of the last chunk's missed experts, those that did not come over the link."""
        missed = sum(int(self.stream.missing(i).sum()) for i in self.stream.routed)
        return 1 - sum(self._copied) / missed if self._copied and missed else 0.0

    def _may_go_ahead(self, layer: int) -> bool:
        """Whether what follows the layer's rows may be launched before they are there: a kernel's
        first launch may wait for the device, which waits for the rows, so there must be none."""
        after = self._kinds[layer : layer + 2]
        return self._known or self._seen.issuperset(after)

    def _missed(self) -> Missed:
        """What the next chunk misses."""
        layers, stream = self.stream.routed, self.stream
        missed = [int(stream.missing(i).sum()) for i in layers]
        sizes = [stream.expert_bytes(i) for i in layers]
        n_bytes = sum(n * size for n, size in zip(missed, sizes, strict=True))
        return Missed(
            len(stream.missing(layers[0])),
            sum(missed) / len(layers),
            n_bytes / max(1, sum(missed)),
            max(self.service.n_active),
            4 * self._d_model,
        )

    def _may_learn(self) -> bool:
        """Learning waits for the device, so amid long prompts it has an end."""
        self._lessons += 1
        return self._lessons <= LESSONS or torch.cuda.current_stream().query()

    def _learn(self, numerics: str, n_tokens: int, known: bool) -> None:
        """Times of the last chunk, once the device has ended it."""
        self._unlearned = None
        torch.cuda.current_stream().synchronize()
        layers, clock, stream = self.stream.routed, self.clock, self.stream
        copied = self._copied or [int(stream.missing(i).sum()) for i in layers]
        n_bytes = [n * stream.expert_bytes(i) for n, i in zip(copied, layers, strict=True)]
        mixers = [clock.seconds((i, "begun"), (i, "routed")) for i in layers]
        spans = [clock.seconds((a, "joined"), (b, "joined")) for a, b in pairwise(layers)]
        waited = [i for i, s in enumerate(self.host.times.seconds) if s > 0]
        # of a length's first chunk most layers tell what those that compiled do not
        middle = statistics.mean if known else statistics.median
        self.policy.learn(numerics, n_tokens, Measured(
            statistics.mean(n_bytes),
            statistics.mean(stream.copy_seconds(i) for i in layers),
            middle(mixers),
            middle(spans) if spans else 0.0,
            _mean([self.host.times.seconds[i] for i in waited]),
            tuple(waited),
        ))  # fmt: skip

    def _time_rows(self, n_rows: int) -> float:
        """Seconds an expert of the pool, with so many rows each: the better of two."""
        layer = self.stream.routed[len(self.stream.routed) // 2]
        n = min(TIMED_EXPERTS, len(self.stream.missing(layer)) // 2)
        x_ND = torch.ones(4 * n_rows, self._d_model)
        out_RD = torch.empty(n * n_rows, self._d_model)
        worker, found = self.service.workers[Place.CPU], []
        row = np.arange(n * n_rows, dtype=np.int32)
        start = np.arange(0, n * n_rows + 1, n_rows, dtype=np.int32)
        for turn in range(2):
            expert_G = np.arange(turn * n, turn * n + n, dtype=np.int32)
            began = time.perf_counter()
            worker.begin(
                layer, Groups(expert_G, start, row, row % np.int32(len(x_ND))), x_ND, out_RD
            )
            worker.finish(layer)
            found.append((time.perf_counter() - began) / n)
        return min(found)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0
