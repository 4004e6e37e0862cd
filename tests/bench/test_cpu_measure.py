"""Turns and sums on clocks of our own; expectations are worked out by hand, quartiles by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.bench.cpu_measure import (
    CpuTimes,
    Variant,
    others_share,
    rates,
    ratio,
    read_variant,
    spread,
    take_turns,
)


class Clock:
    """Time that passes only while a variant runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def variant(self, key: str, seconds: float) -> Variant[str]:
        def run(sample: int) -> float:
            self.runs.append((key, sample))
            self.now += seconds
            return seconds

        return Variant(key, 1000, run)


def test_turns_run_every_variant_once_until_the_time_is_up() -> None:
    """A turn takes 1 s; the first warms up; 5 s allow four more."""
    clock = Clock()
    variants = [clock.variant("a", 0.25), clock.variant("b", 0.75)]
    times = take_turns(variants, 5.0, clock=clock)
    assert times == {"a": [0.25] * 4, "b": [0.75] * 4}
    turns = [{key for key, _ in clock.runs[i : i + 2]} for i in range(0, 10, 2)]
    assert turns == [{"a", "b"}] * 5
    # every sample is another place in memory
    assert [sample for _, sample in clock.runs] == list(range(10))
    # neither always goes first
    assert {clock.runs[i][0] for i in range(0, 10, 2)} == {"a", "b"}


def test_slow_variants_still_get_their_least_turns() -> None:
    clock = Clock()
    times = take_turns([clock.variant("slow", 100.0)], 1.0, least=3, clock=clock)
    assert times == {"slow": [100.0] * 3}


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9])
def test_spread_is_median_and_quartiles(n: int) -> None:
    """Expectation: numpy.percentile."""
    numbers = np.random.default_rng(n).random(n)
    found = spread(numbers.tolist())
    assert (found.low, found.median, found.high) == pytest.approx(
        tuple(np.percentile(numbers, [25, 50, 75]))
    )
    assert found.n == n and found.best == min(numbers) and rates(1, numbers).best > 1


def test_rates() -> None:
    """12 GB in 1, 2, 3, 4 and 6 s: 12, 6, 4, 3 and 2 GB/s."""
    assert rates(12, [1, 2, 3, 4, 6]).as_dict() == {
        "median": 4.0, "low": 3.0, "high": 6.0, "best": 12.0, "samples": 5,
    }  # fmt: skip


def test_a_slow_spell_of_the_machine_cancels_out() -> None:
    """Both sides take three times as long in two of five turns; the ratio stays 4."""
    slow = [1, 1, 3, 3, 1]
    theirs, ours = [0.4 * s for s in slow], [0.1 * s for s in slow]
    assert ratio(theirs, ours) == pytest.approx(4)
    # means of either side alone would disagree when the spell hits one side once more
    assert ratio([0.4, 0.4, 1.2, 1.2, 1.2], ours) == pytest.approx(4)


def test_plain_reading_reads_another_place_each_time() -> None:
    """3 places of 40 bytes in 130; as many bytes a sample as asked."""
    memory, seen = torch.arange(130, dtype=torch.uint8), []

    class Pool:
        def measure_read(self, part: torch.Tensor) -> list[float]:
            seen.append((int(part[0]), len(part)))
            return [0.25, 9.0]

    variant = read_variant("read", Pool(), memory, 40)  # type: ignore[arg-type]
    assert variant.n_bytes == 40 and [variant.run(i) for i in range(4)] == [0.25] * 4
    assert seen == [(0, 40), (40, 40), (80, 40), (0, 40)]


@pytest.mark.parametrize(
    ("busy", "own", "expected"),
    [(10.0, 4.0, 0.3), (4.0, 4.0, 0.0), (3.9, 4.0, 0.0), (20.0, 0.0, 1.0)],
)
def test_share_of_other_programs(busy: float, own: float, expected: float) -> None:
    """Of 20 processor seconds, those busy but not our own; never below 0 for rounding."""
    before = CpuTimes(100.0, 1000.0, 7.0)
    after = CpuTimes(100.0 + busy, 1020.0, 7.0 + own)
    assert others_share(before, after) == pytest.approx(expected)
    assert others_share(before, before) == 0.0
