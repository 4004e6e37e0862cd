"""Which experts of a prompt are the CPU's. Expectations: computed by hand or by trying every number
of experts, from made-up speeds."""

from __future__ import annotations

import numpy as np
import pytest

from strata.experts.prompt_share import (
    GIVE_UP_CHUNKS,
    HAND_OVER_S,
    ROWS_TRIED,
    Measured,
    Missed,
    PromptShare,
)

EXPERTS = 64
MISSED = Missed(EXPERTS, EXPERTS, 1e6, 8, 0)
LINK = 1e9
"""An expert takes 1 ms."""
EVERY, NONE = np.ones(EXPERTS, bool), np.zeros(EXPERTS, bool)


def policy_of(fixed: float | None = None, per_row: float = 1e-4) -> PromptShare:
    """The pool takes per_row seconds for each row of an expert."""
    return PromptShare(lambda rows: rows * per_row, lambda: LINK, fixed)


def measured(**given: object) -> Measured:
    usual = {"copied_bytes": 1e6, "copy_s": 1e-3, "mixer_s": 0.0, "layer_s": 0.0}
    return Measured(**(usual | {"cpu_s": 0.0, "cpu_layers": ()} | given))  # type: ignore[arg-type]


def counts(seed: int, most: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, EXPERTS).astype(np.int32)


def test_a_fixed_share_takes_the_experts_with_the_fewest_rows() -> None:
    """By hand: a quarter of 64 is 16; 0.6 of the other three quarters come ahead."""
    policy = policy_of(fixed=0.25)
    assert policy.ahead("exact", 100, MISSED) == pytest.approx(0.45)
    count = np.random.default_rng(0).permutation(EXPERTS).astype(np.int32)
    open_E = np.arange(EXPERTS) >= 20
    host = policy.pick(count, EVERY, open_E)
    assert host.sum() == 16 and not host[:20].any()
    assert count[host].max() < count[open_E & ~host].min()
    assert policy_of(fixed=0.0).ahead("exact", 100, MISSED) == 1.0
    assert policy_of(fixed=1.0).ahead("exact", 100, MISSED) == 0.0


@pytest.mark.parametrize("most", [4, 12, 60])
@pytest.mark.parametrize("mixer_s", [0.0, 0.02])
def test_link_and_cpu_are_balanced(most: int, mixer_s: float) -> None:
    """Trying every number of experts, those with the fewest rows first."""
    policy = policy_of()
    policy.ahead("exact", 40, MISSED)
    policy.learn("exact", 40, measured(mixer_s=mixer_s))
    policy.ahead("exact", 40, MISSED)
    count = counts(1, most)
    host = policy.pick(count, EVERY, EVERY)
    times = []
    for n in range(EXPERTS + 1):
        taken = np.sort(count)[:n]
        link = 1e-3 * (np.sort(count)[n:] > 0).sum()
        cpu = mixer_s + 1.2e-4 * taken.sum() + (HAND_OVER_S if taken.sum() else 0)
        times.append(max(link, cpu))
    taken = np.sort(count[host])
    link = 1e-3 * (count[~host] > 0).sum()
    cpu = mixer_s + 1.2e-4 * taken.sum() + (HAND_OVER_S if taken.sum() else 0)
    assert max(link, cpu) == pytest.approx(min(times))
    assert host.any()


def test_a_cpu_that_is_too_slow_gets_none() -> None:
    assert policy_of(per_row=1.0).ahead("fast", 4096, MISSED) == 1.0
    assert policy_of().ahead("fast", 40, Missed(EXPERTS, 0, 1e6, 8, 0)) == 1.0
    policy = policy_of()
    assert policy.ahead("fast", 40, MISSED) < 1.0
    policy.learn("fast", 40, measured(mixer_s=1.0, layer_s=1.0))
    assert policy.ahead("fast", 40, MISSED) == 1.0, "the mixer takes longer than the link"


def test_the_pool_s_speed_follows_what_was_measured() -> None:
    """Twice as slow as promised: its experts cost twice as much from then on."""
    policy = policy_of()
    policy.ahead("fast", 40, MISSED)
    count = np.full(EXPERTS, 5, np.int32)
    first = int(policy.pick(count, EVERY, EVERY).sum())
    promised = first * 5 * 1e-4
    policy.learn("fast", 40, measured(cpu_s=HAND_OVER_S + 2.4 * promised, cpu_layers=(0,)))
    policy.ahead("fast", 40, MISSED)
    # n * 1.2 ms + 0.6 ms = (64 - n) ms against n * 0.6 ms + 0.6 ms = (64 - n) ms, by hand
    assert (first, int(policy.pick(count, EVERY, EVERY).sum())) == (40, 29)


def test_a_slower_mode_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """The link alone takes 64 ms a layer; one with a share took 70."""
    policy = policy_of()
    assert policy.ahead("fast", 40, MISSED) < 1
    policy.pick(counts(0, 9), EVERY, EVERY)
    with caplog.at_level("INFO", logger="strata.prompt"):
        policy.learn("fast", 40, measured(layer_s=0.070))
    assert "the CPU gets none" in caplog.text
    found = [policy.ahead("fast", 40, MISSED) for _ in range(GIVE_UP_CHUNKS + 1)]
    assert found[:-1] == [1.0] * GIVE_UP_CHUNKS and found[-1] < 1


def test_rows_beyond_those_tried_cost_as_the_last_ones() -> None:
    """By hand: 0.1 ms a row; between the points straight lines, nothing for no row."""
    policy = policy_of()
    policy.ahead("fast", 40, MISSED)
    tried = np.array([0, 1, 6, ROWS_TRIED[-1], 100], np.int32)
    assert policy._cpu(tried) == pytest.approx([0, 1e-4, 6e-4, 32e-4, 100e-4])
