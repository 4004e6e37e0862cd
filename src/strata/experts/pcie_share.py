"""Which missed experts the GPU reads over PCIe: the rule that the PCIe share adds to the plan.

Of the n experts that a layer's window misses, in order of first appearance, the last moved[n - 1]
are read from RAM by the GPU if a device can read them there; the others stay with the CPU. Knows no
addresses but 0 = none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from strata.core.types import Place
from strata.kernels.plan import Draft, Rule

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


def pcie_rule(moved: Sequence[int], host_addr_E: Callable[[int], npt.NDArray[np.int64]]) -> Rule:
    """Moves CPU experts to PCIE. host_addr_E: addresses of a layer's experts, 0 = none."""

    def rule(draft: Draft) -> None:
        missed = np.flatnonzero(draft.place_G == Place.CPU)
        n_moved = moved[len(missed) - 1] if len(missed) else 0
        last = missed[len(missed) - n_moved :]
        readable = host_addr_E(draft.layer)[draft.expert_G[last]] != 0
        draft.place_G[last[readable]] = Place.PCIE

    return rule


def missed_experts(
    expert_LR: npt.NDArray[np.int32], place_LR: npt.NDArray[np.int8]
) -> npt.NDArray[np.int64]:
    """Distinct experts of each layer that CPU and link had, int64 [L]; place -1: no row."""
    missed = (place_LR >= Place.PCIE) & (place_LR <= Place.CPU_LATE)
    sorted_LR = np.sort(np.where(missed, expert_LR, -1), axis=1)
    found: npt.NDArray[np.int64] = (np.diff(sorted_LR, axis=1, prepend=-1) != 0).sum(axis=1)
    return found
