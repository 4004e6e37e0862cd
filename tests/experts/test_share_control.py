"""The PCIe share finds the quickest value of a made-up machine and stays there.

Expectations: the time of a window is max(host, link) by construction, so the best share is where
both are equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from strata.experts.share_control import ShareControl


def run(best: float, noise: float, windows: int, size: int = 1) -> tuple[ShareControl, list[float]]:
    rng = np.random.default_rng(1)
    applied: list[int] = []
    control = ShareControl(64, applied.append)
    times = []
    for _ in range(windows):
        control.before(size)
        share = applied[-1] / 256
        seconds = 0.002 + 0.01 * max((1 - share) / (1 - best), share / max(best, 1e-9))
        control.after(size, seconds * (1 + noise * rng.standard_normal()))
        times.append(seconds)
    return control, times


@pytest.mark.parametrize("best", [0.1, 0.35, 0.5, 0.8])
def test_the_share_comes_near_the_best(best: float) -> None:
    control, times = run(best, 0.003, 800)
    assert abs(control.share(1) / 256 - best) < 0.06
    assert np.median(times[-200:]) < 1.08 * min(times)


def test_a_link_that_only_costs_time_is_left_alone() -> None:
    applied: list[int] = []
    control = ShareControl(64, applied.append)
    for _ in range(600):
        control.before(4)
        control.after(4, 0.01 + 0.00001 * applied[-1])
    assert control.share(4) < 16


def test_noise_alone_moves_nothing_far() -> None:
    rng = np.random.default_rng(2)
    control = ShareControl(64, lambda share: None)
    for _ in range(400):
        control.before(1)
        control.after(1, 0.01 * (1 + 0.001 * rng.standard_normal()))
    assert control.share(1) == 64


def test_sizes_have_shares_of_their_own() -> None:
    control, _ = run(0.5, 0.0, 300)
    assert control.share(2) == 64


def test_a_window_that_must_not_be_judged_gets_the_first_share() -> None:
    """Late rows: whatever is being tried, the share is the first one, and trying goes on behind."""
    applied: list[int] = []
    control = ShareControl(64, applied.append)
    control.before(1)
    control.after(1, 0.002)
    control.before(1)
    tried = applied[-1]
    assert tried != 64
    control.rest()
    control.rest()
    assert applied == [64, tried, 64]
    control.before(1)
    assert applied == [64, tried, 64, tried]
