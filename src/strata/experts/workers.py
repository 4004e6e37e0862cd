"""Workers compute the rows of one place. ``begin`` starts, ``finish`` returns when the rows are
written.

A worker knows the plan's groups, the activations and where rows go; it knows no steps, layers'
order or features.
Rows are unweighted: the combine applies the routing weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.experts.store import ExpertStore
from strata.kernels.expert_rows import expert_rows_plain
from strata.kernels.plan import Groups
from strata.native import CpuPool

AddressTable = Callable[[int, npt.NDArray[np.int32]], npt.NDArray[np.int64]]
"""(layer, expert_G) -> address of each expert's blob, int64 [G], or of its pieces, int64 [G, 4]"""


class Worker(Protocol):
    """begin: start on groups; finish: block until those rows are in out_RD."""

    def begin(self, layer: int, groups: Groups, x_TD: torch.Tensor, out_RD: torch.Tensor) -> None:
        """Start. x_TD and out_RD must stay untouched until finish."""
        ...

    def finish(self, layer: int) -> None:
        """Wait for the rows begun for this layer; nothing if none were."""
        ...

    def finish_first(self, layer: int) -> None:
        """Wait for those of the batch of this layer that was begun before the others."""
        ...


class PoolWorker:
    """Rows by the CPU pool, in place, asynchronously."""

    def __init__(
        self, pool: CpuPool, store: ExpertStore, addresses: AddressTable, late: bool = False
    ) -> None:
        self._pool = pool
        self._store = store
        self._addresses = addresses
        self._late = late
        self._tickets: dict[int, list[int]] = {}

    def begin(self, layer: int, groups: Groups, x_TD: torch.Tensor, out_RD: torch.Tensor) -> None:
        """Submit to the pool and return at once; a layer may have several batches."""
        ticket = self._pool.submit_experts(
            self._store.layer(layer).shape,
            x_TD,
            self._addresses(layer, groups.expert_G),
            groups.start,
            groups.row,
            groups.token,
            out_RD,
            late=self._late,
            layer=layer,
        )
        self._tickets.setdefault(layer, []).append(ticket)

    def finish(self, layer: int) -> None:
        """Help the pool until done."""
        with ExitStack() as every:
            # one that fails leaves none of the others behind
            for ticket in reversed(self._tickets.pop(layer, [])):
                every.callback(self._pool.wait, ticket)

    def finish_first(self, layer: int) -> None:
        """Help the pool until that batch is done."""
        tickets = self._tickets.get(layer)
        if tickets:
            self._pool.wait(tickets.pop(0))


class PlainWorker:
    """Rows by plain torch in any float dtype, at once: the reference in float64."""

    def __init__(self, store: ExpertStore, dtype: torch.dtype) -> None:
        self._store = store
        self._dtype = dtype

    def begin(self, layer: int, groups: Groups, x_TD: torch.Tensor, out_RD: torch.Tensor) -> None:
        """Compute all rows now."""
        shape = self._store.layer(layer).shape
        for g, expert in enumerate(groups.expert_G.tolist()):
            entries = slice(int(groups.start[g]), int(groups.start[g + 1]))
            token = torch.from_numpy(groups.token[entries].astype(np.int64))
            row = torch.from_numpy(groups.row[entries].astype(np.int64))
            blob = self._store.blob(layer, expert)
            out_RD[row] = expert_rows_plain(shape, blob, x_TD[token], self._dtype)

    def finish(self, layer: int) -> None:
        """Nothing is pending."""

    def finish_first(self, layer: int) -> None:
        """Nothing is pending."""


class DelayedWorker:
    """A worker that is slow on purpose: a thread sleeps, then computes, while the window runs on.

    For tests of the waits: a step that reads rows without waiting finds what was there before.
    """

    def __init__(self, inner: Worker, delay_s: Mapping[int, float]) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._threads: dict[int, list[threading.Thread]] = {}

    def begin(self, layer: int, groups: Groups, x_TD: torch.Tensor, out_RD: torch.Tensor) -> None:
        """Return at once; the rows come after the layer's delay."""

        def work() -> None:
            time.sleep(self._delay_s.get(layer, 0.0))
            self._inner.begin(layer, groups, x_TD, out_RD)
            self._inner.finish(layer)

        thread = threading.Thread(target=work, name=f"delayed-{layer}")
        self._threads.setdefault(layer, []).append(thread)
        thread.start()

    def finish(self, layer: int) -> None:
        """Join the layer's threads."""
        for thread in self._threads.pop(layer, ()):
            thread.join()

    def finish_first(self, layer: int) -> None:
        """Join the thread of that batch."""
        threads = self._threads.get(layer)
        if threads:
            threads.pop(0).join()
