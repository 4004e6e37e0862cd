"""Which missed experts the GPU reads over PCIe: the rule that the PCIe share adds to the plan.

Of the n experts that a layer's window misses, in order of first appearance, the last moved[n - 1]
are read from RAM by the GPU if a device can read them there; the others stay with the CPU. Knows no
addresses but 0 = none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from strata.core.types import Place
from strata.kernels.plan import Draft, Rule


def pcie_rule(moved: Sequence[int], host_addr_E: Callable[[int], npt.NDArray[np.int64]]) -> Rule:
    """Moves CPU experts to PCIE. host_addr_E: addresses of a layer's experts, 0 = none."""

    def rule(draft: Draft) -> None:
        missed = np.flatnonzero(draft.place_G == Place.CPU)
        n_moved = moved[len(missed) - 1] if len(missed) else 0
        last = missed[len(missed) - n_moved :]
        readable = host_addr_E(draft.layer)[draft.expert_G[last]] != 0
        draft.place_G[last[readable]] = Place.PCIE

    return rule
