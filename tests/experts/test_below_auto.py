"""The threshold of --defer-cpu-below auto: by hand on small records, its promise against a plain
search over all splits, and that a record always gives the same one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from strata.core.errors import EngineError, FormatError
from strata.core.types import Place
from strata.experts.below_auto import (
    LayerTimes,
    Threshold,
    WindowTimes,
    choose_below,
    from_json,
    to_json,
)
from strata.experts.late import LateBelow, late_rule
from strata.kernels.plan import make_plan

SHARES = (0.4, 0.3, 0.2, 0.1)


def one(mixer_us: float, fast_us: float, cpu_us: float, *missed: tuple[float, ...]) -> WindowTimes:
    return WindowTimes(1, (LayerTimes(3, mixer_us, fast_us, cpu_us, missed or (SHARES,)),))


@pytest.mark.parametrize(
    ("mixer_us", "fast_us", "late", "gain"),
    [
        (20, 0, 2, 20),  # c 40, two late experts take the mixer's 20
        (15, 0, 2, 15),  # one hides 10 of 15, two all of it
        (10, 0, 1, 10),
        (400, 0, 4, 40),  # the mixer takes everything
        (20, 30, 1, 10),  # c - f is all there is: 10, which one late expert gives
        (20, 40, 0, 0),  # the CPU is done before the fast tier: nothing to gain, nothing late
        (20, 90, 0, 0),
    ],
)
def test_by_hand(mixer_us: float, fast_us: float, late: int, gain: float) -> None:
    """4 missed experts of 10 us each."""
    found = choose_below(one(mixer_us, fast_us, 10))
    n_late = sum(share < found.below for share in SHARES)
    assert n_late == late and found.gain_us == pytest.approx(gain)
    assert found.late_share == late / 4
    assert (found.mixer_us, found.fast_us, found.cpu_us) == (mixer_us, fast_us, 40)


def test_late_rows_just_fill_the_mixer() -> None:
    """c_late = m to within one expert, over random layers and windows; at least 93 % of the gain
    of deferring all; and no smaller threshold has it (plain search over all of them)."""
    rng = np.random.default_rng(8)
    for _ in range(8):
        layers = []
        for layer in range(int(rng.integers(1, 6))):
            windows = tuple(
                tuple((rng.dirichlet(np.ones(8)) / 2)[: rng.integers(0, 9)].tolist())
                for _ in range(int(rng.integers(1, 5)))
            )
            times = rng.uniform((20, 0, 5), (90, 60, 30))
            layers.append(LayerTimes(layer, *times.tolist(), windows))
        record = WindowTimes(2, tuple(layers))
        found = choose_below(record)
        whole = plain_gain(record, math.inf)
        assert plain_gain(record, found.below) >= 0.93 * whole - 1e-9
        for smaller in np.arange(0, min(found.below, 1.0) - 2e-4, 1e-4):
            assert plain_gain(record, float(smaller)) < 0.93 * whole or whole == 0
        assert found == choose_below(record)
    just = choose_below(one(35, 0, 1, tuple(np.linspace(0.001, 0.1, 80).tolist())))
    assert just.late_share * 80 == pytest.approx(0.93 * 35, abs=1)


def plain_gain(record: WindowTimes, below: float) -> float:
    """Sum of min(m, c - max(f, c_on)), at least 0, by loops."""
    total = 0.0
    for layer in record.layers:
        for window in layer.missed:
            c = layer.cpu_us * len(window)
            c_on = layer.cpu_us * sum(share >= below for share in window)
            total += max(min(layer.mixer_us, c - max(layer.fast_us, c_on)), 0.0)
    return total


def test_no_missed_expert_and_no_layer() -> None:
    for record in (one(20, 0, 10, ()), WindowTimes(1, ())):
        assert choose_below(record).below == 0


def test_lines() -> None:
    """What is printed says what is late and why."""
    assert "rows below 0.2001 are late, 50 % of the experts" in choose_below(one(20, 0, 10)).line()
    assert "all rows are late" in choose_below(one(400, 0, 10)).line()
    assert "nothing is late" in choose_below(one(20, 40, 10)).line()
    text = Threshold(4, 0.1, 1, 2, 0.5, 30, 20, 10).line()
    assert "windows of 4" in text and "m 30, f 20, c 10 us" in text


def test_through_json() -> None:
    record = one(20.5, 3, 10, SHARES, (), (0.25,))
    assert from_json(json.loads(json.dumps(to_json(record)))) == record
    for damage in ({"layers": 3}, {"mixer_us": -1}, {"missed": [["x"]]}, {"cpu_us": math.nan}):
        stored = json.loads(json.dumps(to_json(record)))
        target = stored if "layers" in damage else stored["layers"][0]
        target.update(damage)
        with pytest.raises(FormatError, match="damaged"):
            from_json(stored)


def test_rule_goes_by_the_window_size() -> None:
    """A size without a threshold goes by the next smaller one; without any it is an error."""
    below = LateBelow()
    with pytest.raises(EngineError, match="has no threshold yet"):
        below.of(1)
    below.fix(1, 0.25)
    below.fix(3, math.inf)
    assert [below.of(n) for n in (1, 2, 3, 8)] == [0.25, 0.25, math.inf, math.inf]
    rule = late_rule([0], below.of)
    weight = np.array([0.5, 0.3, 0.2] * 3, np.float32)
    expert = np.arange(9, dtype=np.int32)
    for n_tokens, late in ((1, [2]), (2, [2, 5]), (3, list(range(9)))):
        n = 3 * n_tokens
        plan = make_plan(0, expert[:n], weight[:n], 3, np.zeros(9, np.int64), [rule])
        assert np.flatnonzero(plan.place_R == Place.CPU_LATE).tolist() == late
