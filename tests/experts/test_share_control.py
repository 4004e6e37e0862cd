"""The PCIe share finds the quickest numbers of a made-up machine and stays there.

Expectations: a layer takes max(host, link) by construction, so for every number of missed experts
the best number for the link can be had by trying all.
"""

from __future__ import annotations

import numpy as np
import pytest

from strata.experts.link_part import Moved, fixed_share
from strata.experts.share_control import ShareControl, compared

MOST = 10


def layer_us(n: int, k: int, link: float, start: float) -> float:
    """A CPU takes 32 us an expert; the link ``link``, and ``start`` before the first."""
    return max(32.0 * (n - k), start + link * k if k else 0.0)


def run(
    link: float, start: float, noise: float, windows: int, half_cached: bool = False, size: int = 1
) -> tuple[ShareControl, list[float], list[float]]:
    """Control, seconds of every window, and what the best numbers would have taken."""
    rng = np.random.default_rng(1)
    applied: list[Moved] = []
    control = ShareControl(64, MOST, applied.append)
    times, best = [], []
    all_us = np.array([[layer_us(n, k, link, start) for k in range(11)] for n in range(11)])
    least_us = np.array([all_us[n, : n + 1].min() for n in range(11)])
    for _ in range(windows):
        n_L = rng.binomial(10, 0.5, 48) if half_cached else np.full(48, 10)
        control.before(size)
        us, least = all_us[n_L, np.array([0, *applied[-1]])[n_L]].sum(), least_us[n_L].sum()
        seconds = (80 * 48 + us) / 1e6 * (1 + noise * rng.standard_normal())
        control.after(size, seconds, lambda n_L=n_L: n_L)
        times.append(seconds)
        best.append((80 * 48 + least) / 1e6)
    return control, times, best


@pytest.mark.parametrize(("link", "start"), [(58.0, 10.0), (40.0, 0.0), (110.0, 20.0), (20.0, 5.0)])
def test_the_numbers_become_the_best(link: float, start: float) -> None:
    control, times, best = run(link, start, 0.002, 700)
    assert np.median(times[-200:]) < 1.02 * np.median(best)
    assert control.kept(1)[9] == min(range(11), key=lambda k: layer_us(10, k, link, start))


@pytest.mark.parametrize(("link", "start"), [(58.0, 10.0), (58.0, 40.0), (110.0, 20.0)])
def test_with_half_of_the_experts_cached(link: float, start: float) -> None:
    """A window's time changes by 5 % with what it misses; what is kept is near the best, and far
    nearer than the first share."""
    _, times, best = run(link, start, 0.002, 1200, half_cached=True)
    assert np.median(times[-300:]) < 1.025 * np.median(best)


def test_a_link_that_only_costs_time_is_left_alone() -> None:
    applied: list[Moved] = []
    control = ShareControl(64, MOST, applied.append)
    for _ in range(600):
        control.before(4)
        control.after(4, 0.01 + 0.0005 * applied[-1][9], lambda: np.full(48, 10))
    assert control.kept(4)[9] == 0


def test_noise_alone_moves_nothing() -> None:
    rng = np.random.default_rng(2)
    control = ShareControl(64, MOST, lambda moved: None)
    for _ in range(400):
        control.before(1)
        control.after(1, 0.01 * (1 + 0.001 * rng.standard_normal()), lambda: np.full(48, 10))
    assert control.share(1) == 64


def test_what_runs_alike_is_not_tried_twice() -> None:
    """Every layer misses 10: no two numbers for 10 are tried while the kept one stays."""
    applied: list[Moved] = []
    control = ShareControl(64, MOST, applied.append)
    while not control.resting(1):
        control.before(1)
        control.after(1, 0.01 + abs(applied[-1][9] - 2) * 0.001, lambda: np.full(48, 10))
    tried = [moved[9] for moved in applied if moved[9] != 2]
    in_turns = [k for i, k in enumerate(tried) if i == 0 or tried[i - 1] != k]
    assert len(in_turns) == len(set(in_turns)) >= 2


def test_sizes_have_numbers_of_their_own() -> None:
    control, _, _ = run(58.0, 10.0, 0.0, 300)
    assert control.share(2) == 64 != control.share(1)


def test_a_window_that_must_not_be_judged_gets_the_first_share() -> None:
    """Late rows: whatever is being tried, the share is the first one, and trying goes on behind."""
    applied: list[Moved] = []
    control = ShareControl(64, MOST, applied.append)
    for seconds in (0.002, None):
        control.before(1)
        if seconds is not None:
            control.after(1, seconds, lambda: np.full(48, 10))
    tried = applied[-1]
    assert tried[9] == 4
    control.rest()
    control.rest()
    assert applied[1:] == [tried, fixed_share(64, MOST)]
    control.before(1)
    assert applied[3:] == [tried]
    control.fix(128)
    assert applied[4:] == [fixed_share(128, MOST)]


def test_windows_that_missed_more_are_compared_as_if_they_had_not() -> None:
    """Both cost 2 ms + 10 us a missed expert, the second 0.1 ms less; it missed 50 more."""
    kept = [(2e-3 + 1e-5 * n, n) for n in (200, 230, 260)]
    tried = [(1.9e-3 + 1e-5 * n, n) for n in (240, 280, 330)]
    first, second = compared(kept, tried)
    assert first - second == pytest.approx(1e-4)
    assert first == pytest.approx(2e-3 + 1e-5 * np.mean([200, 230, 260, 240, 280, 330]))
