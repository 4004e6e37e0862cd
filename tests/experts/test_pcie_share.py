"""The PCIe share: the rule by hand on small plans, the numbers by hand and against all numbers."""

from __future__ import annotations

import numpy as np
import pytest

from strata.core.types import Place
from strata.experts.link_part import Speeds, fixed_share, missed_experts, share_numerator
from strata.experts.pcie_share import pcie_rule
from strata.kernels.plan import make_plan

EXPERT = np.array([7, 3, 5, 3, 1, 0], np.int32)
"""Order of first appearance: 7 3 5 1 0; expert 5 is in the fast tier below."""


def places(numerator: int, host: dict[int, int]) -> dict[int, Place]:
    fast, table = np.zeros(8, np.int64), np.zeros(8, np.int64)
    fast[5] = 4096
    for expert, address in host.items():
        table[expert] = address
    rule = pcie_rule(fixed_share(numerator, 6), lambda layer: table if layer == 2 else 0 * table)
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


def test_numbers_by_hand() -> None:
    """A quarter of the speed: the link takes three times as long. 4 missed: 1 and 3 end together;
    3 missed: 1 would end with 3 at the link, as 0 does at the CPU. A lead of one expert (4
    quarters): 4 missed end at 4 with 1 moved or with none, 5 missed at 4 with 1 moved."""
    assert Speeds(64).moved(8) == (0, 0, 0, 1, 1, 1, 1, 2)
    assert Speeds(64, 4).moved(5) == (0, 0, 0, 0, 1)
    assert Speeds(0).moved(3) == (0, 0, 0) and Speeds(256).moved(3) == (1, 2, 3)


@pytest.mark.parametrize("parts", [16, 77, 105, 128, 200])
@pytest.mark.parametrize("lead", [-8, 0, 3, 24])
def test_numbers_end_soonest(parts: int, lead: int) -> None:
    """No other number ends sooner: max(CPU, link) in units of the CPU's time for one expert."""
    moved = Speeds(parts, lead).moved(40)
    for n, found in enumerate(moved, 1):
        ends = [
            max(n - k, k * (256 - parts) / parts + lead / 4 if k else 0.0) for k in range(n + 1)
        ]
        assert ends[found] == pytest.approx(min(ends), rel=1e-12) and found <= n


def test_missed_experts_are_counted_once() -> None:
    """Layer 0: expert 4 twice on the CPU, 0 late, 7 over the link, 5 cached, 6 skipped: 3. Layer 1
    has one row, cached."""
    expert = np.array([[4, 5, 0, 4, 7, 6], [0, 9, 9, 9, 9, 9]], np.int32)
    p = Place
    place = np.array(
        [[p.CPU, p.FAST, p.CPU_LATE, p.CPU, p.PCIE, p.SKIPPED], [p.FAST, *[-1] * 5]], np.int8
    )
    assert missed_experts(expert, place).tolist() == [3, 0]
