"""The CPU's part of a prompt's experts, while the link brings the others to the device.

Per layer of a chunk: the device's routing and the feed-forward's inputs go to page-locked memory
(``hand``), the host waits for them (``counts``), the pool computes the rows of the experts that it
is given (``start``), and the device takes them from where the pool wrote them (``join``), as soon
as a word says that they are there. What follows may be enqueued before the pool has ended;
``settle`` ends it. Knows no steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import StallError
from strata.core.types import Place
from strata.experts.device_service import DeviceService
from strata.kernels.expert_rows.launch import GpuGroups
from strata.kernels.expert_rows.triton_take import take_rows
from strata.kernels.plan import Groups
from strata.kernels.words import RELEASED, WORD_BYTES, raise_word, read_word
from strata.kernels.words.triton import wait
from strata.memory.handshake import DEVICE_LIMIT_NS

MOST_BYTES = 1 << 30
"""Of page-locked memory for rows; chunks that could need more leave nothing to the CPU."""
READY, FAILED = range(2)
"""Words: the last rows that are there, and the device's complaint that none came."""


BATCHES = (0.04, 0.25)
"""The pool gets a layer's rows in pieces that end at these parts of them: handing many rows over
takes one thread a while, and meanwhile the others have the first ones."""
LEAST_ROWS = 512
"""Of a layer whose rows go in several pieces."""
IDLE_S = 1e-4


@dataclass
class HostTimes:
    """Of each layer of the last chunk with a part for the CPU: its rows, and seconds from the
    routing's arrival to the last row; negative where the pool had ended before anybody asked."""

    seconds: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def _nothing() -> None:
    pass


class HostRows:
    """One chunk at a time. device "cpu": nothing waits, the rows are there when ``start`` ends."""

    def __init__(
        self, service: DeviceService, device: torch.device, d_model: int, n_active: Sequence[int]
    ) -> None:
        self._service, self._n_active, self._width = service, list(n_active), d_model
        self._compiled = device.type == "cuda"
        self._device = device
        self._words = self._host(2 * WORD_BYTES // 4, dtype=torch.int32)
        self._word_view: npt.NDArray[np.uint32] = self._words.numpy().view(np.uint32)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._x = self._host(0, d_model)
        self._out = self._host(0, d_model)
        self._ints: dict[str, torch.Tensor] = {}
        self._routed = torch.cuda.Event() if self._compiled else None  # type: ignore[no-untyped-call]
        self._turn = 0
        self._pending: int | None = None
        self._parts: list[Groups] = []
        self._began = 0.0
        self.times = HostTimes()

    def fits(self, n_tokens: int) -> bool:
        """Whether the rows of such a chunk fit, whatever the routing."""
        return 4 * n_tokens * max(self._n_active, default=0) * self._width <= MOST_BYTES

    def begin(self, n_tokens: int) -> None:
        """A chunk starts."""
        self.require_no_timeout()
        self.times = HostTimes()
        if len(self._x) < n_tokens:
            self._x = self._host(n_tokens, self._width)

    def hand(self, layer: int, x_ND: torch.Tensor, groups: GpuGroups) -> None:
        """Enqueue what the CPU needs to know: inputs f32 [N, D], and all rows by expert."""
        self._x[: len(x_ND)].copy_(x_ND, non_blocking=True)
        self._number("start", len(groups.start)).copy_(groups.start, non_blocking=True)
        self._number("row", len(groups.entry_row)).copy_(groups.entry_row, non_blocking=True)
        if self._routed is not None:
            self._routed.record(torch.cuda.current_stream())

    def counts(self) -> npt.NDArray[np.int32]:
        """Wait for what was handed: rows of each expert, [E]."""
        self.settle()
        if self._routed is not None:
            self._routed.synchronize()
        self._began = time.perf_counter()
        return np.diff(self._ints["start"].numpy())

    def start(
        self, layer: int, host_E: npt.NDArray[np.bool_], meanwhile: Callable[[], None] = _nothing
    ) -> torch.Tensor:
        """Let the pool begin with these experts; they are returned as int32 [E] in memory that the
        device reads. meanwhile: called when the pool has enough for a while."""
        groups = self._groups(layer, host_E)
        self.times.rows.append(groups.n_rows)
        if len(self._out) < groups.n_rows:
            self._out = self._host(groups.n_rows * 5 // 4, self._width)
        n_tokens = len(self._ints["row"]) // self._n_active[layer]
        worker = self._service.workers[Place.CPU]
        self._pending = layer
        self._turn += 1
        parts = self._parts = list(batches(groups))
        for i, part in enumerate(parts):
            if i == len(parts) - 1:
                meanwhile()
            worker.begin(layer, part, self._x[:n_tokens], self._out)
        if not parts:
            meanwhile()
        taken = self._number("taken", len(host_E))
        taken.copy_(torch.from_numpy(host_E))
        return taken

    def join(self, layer: int, rows_RD: torch.Tensor) -> None:
        """Enqueue the CPU's rows' way into rows_RD f32 [R, D], behind their word."""
        if not self._compiled:
            self.settle()
        end = 0
        for i, part in enumerate(self._parts):
            first, end = end, end + part.n_rows
            if self._compiled:
                self._wait(self._value(i))
            take_rows(self._out, self._ints["target"], first, end, rows_RD)

    def settle(self) -> None:
        """End the layer that the pool is at, if any, and say so to the device, which goes on even
        if the pool has failed."""
        layer, self._pending = self._pending, None
        if layer is None:
            return
        asked = time.perf_counter()
        worker = self._service.workers[Place.CPU]
        try:
            for i in range(len(self._parts) - 1):
                worker.finish_first(layer)
                raise_word(self._word_view, READY, self._value(i))
        finally:
            self._end(layer)
        now = time.perf_counter()
        took = now - self._began
        self.times.seconds.append(took if now - asked > IDLE_S else -took)

    def _end(self, layer: int) -> None:
        try:
            self._service.workers[Place.CPU].finish(layer)
        finally:
            raise_word(self._word_view, READY, self.awaited())

    def abandon(self) -> None:
        """The chunk is void: nothing may wait for it any more."""
        try:
            self.settle()
        finally:
            raise_word(self._word_view, READY, RELEASED)
            if self._compiled:
                torch.cuda.synchronize()
            self._word_view[:] = 0
            self._turn = 0

    def require_no_timeout(self) -> None:
        """StallError when the device's wait ran into its own limit."""
        if read_word(self._word_view, FAILED):
            self._word_view[:] = 0
            raise StallError(
                f"the GPU waited {DEVICE_LIMIT_NS / 1e9:g} s for the CPU's rows of a prompt; the "
                f"sequence is void, start it anew"
            )

    def ready(self) -> int:
        """The word: the last rows that are there."""
        return read_word(self._word_view, READY)

    def awaited(self) -> int:
        """What the word is once the rows last asked for are there."""
        return self._value(len(BATCHES))

    def _value(self, part: int) -> int:
        """The word once so many parts of the rows, from 0, are there."""
        # neither 1 nor a multiple of 16, which kernels are compiled for apart
        return 16 * self._turn + 2 + part

    def _wait(self, value: int) -> None:
        address = self._words.data_ptr()
        wait(
            address + READY * WORD_BYTES, value, DEVICE_LIMIT_NS,
            address + FAILED * WORD_BYTES, self._one,
        )  # fmt: skip

    def _groups(self, layer: int, host_E: npt.NDArray[np.bool_]) -> Groups:
        """The layer's rows of the CPU in the order in which they are written, experts with few rows
        first."""
        k = self._n_active[layer]
        start_E, row_R = self._ints["start"].numpy(), self._ints["row"].numpy()
        count_E = np.diff(start_E)
        expert_G = np.flatnonzero(host_E & (count_E > 0)).astype(np.int32)
        expert_G = expert_G[np.argsort(count_E[expert_G], kind="stable")]
        count_G = count_E[expert_G]
        start = np.concatenate([[0], np.cumsum(count_G)]).astype(np.int32)
        order = np.arange(start[-1], dtype=np.int32)
        row = row_R[order + np.repeat(start_E[expert_G] - start[:-1], count_G)]
        self._number("target", len(row_R)).numpy()[: len(row)] = row
        return Groups(expert_G, start, order, row // np.int32(k))

    def _number(self, name: str, n: int) -> torch.Tensor:
        """int32 [n] of host memory."""
        found = self._ints.get(name)
        if found is None or len(found) != n:
            found = self._ints[name] = self._host(n, dtype=torch.int32)
        return found

    def _host(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._compiled)


def batches(groups: Groups) -> Iterator[Groups]:
    """The groups in pieces: small ones first where there are many rows."""
    cuts = [0, len(groups.expert_G)]
    if groups.n_rows >= LEAST_ROWS:
        cuts[1:1] = [int(np.searchsorted(groups.start, part * groups.n_rows)) for part in BATCHES]
    for first, end in pairwise(cuts):
        if first < end:
            start = groups.start[first : end + 1]
            entries = slice(int(start[0]), int(start[-1]))
            yield Groups(
                groups.expert_G[first:end], start - start[0], groups.row[entries],
                groups.token[entries],
            )  # fmt: skip
