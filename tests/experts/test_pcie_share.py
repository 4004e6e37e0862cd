"""The PCIe share: the rule by hand on small plans."""

from __future__ import annotations

import numpy as np
import pytest

from strata.core.types import Place
from strata.experts.pcie_share import pcie_rule, share_numerator
from strata.kernels.plan import make_plan

EXPERT = np.array([7, 3, 5, 3, 1, 0], np.int32)
"""Order of first appearance: 7 3 5 1 0; expert 5 is in the fast tier below."""


def places(numerator: int, host: dict[int, int]) -> dict[int, Place]:
    fast, table = np.zeros(8, np.int64), np.zeros(8, np.int64)
    fast[5] = 4096
    for expert, address in host.items():
        table[expert] = address
    rule = pcie_rule(numerator, lambda layer: table if layer == 2 else 0 * table)
    plan = make_plan(2, EXPERT, np.ones(6, np.float32), 3, fast, [rule])
    return {int(e): Place(int(p)) for e, p in zip(EXPERT, plan.place_R, strict=True)}


@pytest.mark.parametrize(
    ("numerator", "moved"),
    [(0, ()), (63, ()), (64, (0,)), (128, (1, 0)), (255, (3, 1, 0)), (256, (7, 3, 1, 0))],
)
def test_the_last_missed_experts_move(numerator: int, moved: tuple[int, ...]) -> None:
    """4 are missed: floor(4 * numerator / 256) of them, counted from the end."""
    found = places(numerator, dict.fromkeys(range(8), 4096))
    wanted = {e: Place.PCIE if e in moved else Place.CPU for e in (7, 3, 1, 0)}
    assert found == wanted | {5: Place.FAST}


def test_what_no_device_can_read_stays_and_is_not_replaced() -> None:
    found = places(128, {7: 4096, 3: 4096, 0: 4096})
    assert [e for e, p in found.items() if p == Place.PCIE] == [0]
    assert found[1] == Place.CPU


@pytest.mark.parametrize(
    ("fraction", "numerator"), [(0, 0), (0.3, 77), (1, 256), (2, 256), (-1, 0)]
)
def test_numerator(fraction: float, numerator: int) -> None:
    """round(fraction * 256), cut off at 0 and 256."""
    assert share_numerator(fraction) == numerator
