"""How many of the missed experts the GPU reads over PCIe, the CPU computing the others.

Knows no plan and no windows: numbers from a share or from two speeds, for as many as are missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from strata.core.types import Place

MOST_PARTS = 256
"""A share is a number of 256ths."""
LEAD_PARTS = 4
"""A lead is a number of quarters of the time that the CPU takes for an expert."""

Moved = tuple[int, ...]
"""Experts read over the link when 1, 2, .. are missed."""


def share_numerator(fraction: float) -> int:
    """The fraction 0..1 in 256ths, rounded; outside it is cut off."""
    return min(max(round(fraction * MOST_PARTS), 0), MOST_PARTS)


def fixed_share(numerator: int, most: int) -> Moved:
    """``n * numerator >> 8`` of n, for n up to ``most``."""
    return tuple(n * numerator >> 8 for n in range(1, most + 1))


@dataclass(frozen=True)
class Speeds:
    """The link beside the CPU, both at work.

    parts: the link's part of both speeds in 256ths. lead: how much later than the CPU the link is
    done, apart from its experts: quarters of the CPU's time for one.
    """

    parts: int
    lead: int = 0

    def moved(self, most: int) -> Moved:
        """The numbers of experts with which both are done soonest, the smaller of equal ones."""
        return _moved(self, most)


@cache
def _moved(speeds: Speeds, most: int) -> Moved:
    if speeds.parts == 0:
        return (0,) * most
    # in units of the CPU's time for an expert, times parts * LEAD_PARTS: whole numbers
    cpu, link = speeds.parts * LEAD_PARTS, (MOST_PARTS - speeds.parts) * LEAD_PARTS
    behind = speeds.lead * speeds.parts

    def best(n: int) -> int:
        return min(range(n + 1), key=lambda k: max((n - k) * cpu, k * link + behind if k else 0))

    return tuple(best(n) for n in range(1, most + 1))


def missed_experts(
    expert_LR: npt.NDArray[np.int32], place_LR: npt.NDArray[np.int8]
) -> npt.NDArray[np.int64]:
    """Distinct experts of each layer that CPU and link had, int64 [L]; place -1: no row."""
    missed = (place_LR >= Place.PCIE) & (place_LR <= Place.CPU_LATE)
    sorted_LR = np.sort(np.where(missed, expert_LR, -1), axis=1)
    found: npt.NDArray[np.int64] = (np.diff(sorted_LR, axis=1, prepend=-1) != 0).sum(axis=1)
    return found
