"""Takes turns between variants of the same work and sums the times up: medians, spread, ratios.

Ratios compare times of the same turn, so that a machine that becomes slower for a while slows both
sides. Knows no weights.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from strata.native import CpuPool

Key = TypeVar("Key")
LEAST_TURNS = 3


@dataclass(frozen=True)
class Variant(Generic[Key]):
    """One way of doing the work. run: seconds of sample i, which reads ``n_bytes`` of memory."""

    key: Key
    n_bytes: int
    run: Callable[[int], float]


def read_variant(key: Key, pool: CpuPool, memory: torch.Tensor, n_bytes: int) -> Variant[Key]:
    """Plain reading of n_bytes by the pool's workers, at another place of a memory each time.

    As many bytes as the samples beside it: what interrupts them on a busy machine takes the same
    share of each.
    """
    n_places = memory.numel() // n_bytes
    assert n_places, "a sample is smaller than the memory"

    def run(sample: int) -> float:
        at = sample % n_places * n_bytes
        return pool.measure_read(memory[at : at + n_bytes])[0]

    return Variant(key, n_bytes, run)


@dataclass(frozen=True)
class Spread:
    """Median, the quartiles below and above it, and the best, of ``n`` samples."""

    median: float
    low: float
    high: float
    best: float
    n: int

    def as_dict(self, digits: int = 3) -> dict[str, float]:
        """For JSON."""
        return {
            "median": round(self.median, digits),
            "low": round(self.low, digits),
            "high": round(self.high, digits),
            "best": round(self.best, digits),
            "samples": self.n,
        }


def take_turns(
    variants: Sequence[Variant[Key]],
    seconds: float,
    *,
    least: int = LEAST_TURNS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """Seconds of every variant in every turn; one turn to warm up is not counted.

    Each turn runs every variant once, in an order of its own. Turns end when ``seconds`` have
    passed, but not before ``least`` of them.
    """
    times: dict[Key, list[float]] = {v.key: [] for v in variants}
    order = random.Random(0)
    sample = turn = 0
    start = clock()
    while turn <= least or clock() - start < seconds:
        for v in order.sample(list(variants), len(variants)):
            spent = v.run(sample)
            sample += 1
            if turn:
                times[v.key].append(spent)
        turn += 1
    return times


def spread(numbers: Sequence[float], better: Callable[[Sequence[float]], float] = min) -> Spread:
    """Median and quartiles; better picks the best number, the least unless said otherwise."""
    low = median = high = numbers[0]
    if len(numbers) > 1:
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(median, low, high, better(numbers), len(numbers))


def rates(amount: float, seconds: Sequence[float]) -> Spread:
    """Amount a second."""
    return spread([amount / s for s in seconds], max)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of above / below, turn by turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


@dataclass(frozen=True)
class CpuTimes:
    """Processor seconds so far: of the machine (busy and all), and of this process."""

    busy: float
    total: float
    own: float


def others_share(before: CpuTimes, after: CpuTimes) -> float:
    """Share of the machine's processor time that other programs took in between, 0 to 1."""
    total = after.total - before.total
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, others / total)) if total > 0 else 0.0
