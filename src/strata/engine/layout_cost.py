"""How long a weight takes on this machine in either layout: the start-up measurement behind
--expert-layout auto.

A product runs at the slower of two speeds: the kernels' (measured on matrices that stay in the
cache) and memory's (measured by reading much more than any cache holds).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from strata.experts.store import anonymous
from strata.formats.tiles import Layout, matrix_bytes
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight
from strata.native import CpuPool
from strata.native.caches import cache_bytes
from strata.native.recode import encode_into

ROWS_PER_WORKER, N_COLS = 64, 2048
_REPEATS = 5
_READ_BYTES, _CACHES = 256 << 20, 2.5


class Products(Protocol):
    """What is needed of the CPU pool."""

    @property
    def workers(self) -> int:
        """Threads that compute."""
        ...

    def linear(self, w: Weight, x_TK: torch.Tensor) -> torch.Tensor:
        """The product."""
        ...


class MeasuredCost:
    """An ``experts.layouts.Cost``: measures each type and layout once, when first asked.

    read_bytes_per_s: of memory, by all workers.
    """

    def __init__(
        self,
        pool: Products,
        read_bytes_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool, self._speed, self._clock = pool, read_bytes_per_s, clock
        self._known: dict[tuple[str, Layout], float] = {}

    def __call__(self, kind: str, layout: Layout) -> float:
        """Seconds of one weight, read once."""
        if (kind, layout) not in self._known:
            n_bytes = matrix_bytes(kind, layout, 16, N_COLS) / (16 * N_COLS)
            seconds = max(self._in_cache(kind, layout), n_bytes / self._speed)
            self._known[kind, layout] = seconds
        return self._known[kind, layout]

    def lines(self) -> list[str]:
        """What was measured, for people: one line, none when nothing was."""
        kinds = sorted({kind for kind, _ in self._known})
        if not kinds:
            return []
        text = ", ".join(f"{k} {self._per_second(k, 'tiles')}/{self._per_second(k, 'native')}"
                         for k in kinds)  # fmt: skip
        read = f"{self._speed / 1e9:.1f} GB/s of memory"
        return [f"measured here: {read}; 1e9 weights/s as tiles/native: {text}"]

    def _per_second(self, kind: str, layout: Layout) -> str:
        seconds = self._known.get((kind, layout))
        return "-" if seconds is None else f"{1e-9 / seconds:.1f}"

    def _in_cache(self, kind: str, layout: Layout) -> float:
        n_rows = ROWS_PER_WORKER * self._pool.workers
        w = _matrix(kind, layout, n_rows)
        x = torch.ones(1, N_COLS)
        best = float("inf")
        self._pool.linear(w, x)
        for _ in range(_REPEATS):
            start = self._clock()
            self._pool.linear(w, x)
            best = min(best, self._clock() - start)
        return best / (n_rows * N_COLS)


def read_speed(
    workers: int,
    most_bytes: int | None = None,
    ready: Callable[[], None] | None = None,
    passes: int = 3,
) -> float:
    """Bytes of memory that so many threads read in a second, from more than the caches hold, but
    not more than most_bytes; the best of so many passes. ready: called before they begin."""
    wanted = max(_READ_BYTES, int(_CACHES * cache_bytes()))
    memory = anonymous(wanted if most_bytes is None else max(1 << 20, min(wanted, most_bytes)))
    memory.fill_(1)  # without this all pages would be one page of zeros
    pool = CpuPool(workers)
    try:
        if ready is not None:
            ready()
        return memory.numel() / min(pool.measure_read(memory, passes))
    finally:
        pool.close()


def _matrix(kind: str, layout: Layout, n_rows: int) -> Weight:
    """Random bytes that give ordinary scales (f16 from 0.01 to 2, e8m0 from 2^-96)."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0x20, 0x40, (n_rows, TYPES[kind].row_bytes(N_COLS)), np.uint8)
    if layout == "native":
        return Weight(kind, n_rows, N_COLS, torch.from_numpy(raw))
    # tiles begin on a multiple of 128 bytes, which NumPy's memory need not
    n_bytes = matrix_bytes(kind, layout, n_rows, N_COLS)
    room = np.empty(n_bytes + 128, np.uint8)
    start = -room.ctypes.data % 128
    encode_into(kind, raw, room[start : start + n_bytes])
    data = torch.from_numpy(room[start : start + n_bytes])
    return Weight(kind, n_rows, N_COLS, data, layout=layout)
