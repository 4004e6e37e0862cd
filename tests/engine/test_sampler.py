"""The sampler against arithmetic written out here and against exact probabilities (chi-square)."""

from __future__ import annotations

import numpy as np
import pytest

from strata.core.errors import NumericsError, SettingError
from strata.core.settings import Settings
from strata.engine.sampler import History, Sampler, build_processors, draw, uniform

NOTHING = History((), 0)


def kept(row: list[float], history: History = NOTHING, **settings: object) -> np.ndarray:
    """The row after all processors."""
    out = np.array(row, dtype=np.float64)
    for processor in build_processors(Settings(**settings), len(row)):
        processor(out, history)
    return out


def survivors(row: list[float], **settings: object) -> list[int]:
    return np.flatnonzero(kept(row, **settings) > -np.inf).tolist()


def softmax(row: np.ndarray) -> np.ndarray:
    weight = np.exp(row - row.max())
    return weight / weight.sum()


def test_greedy_takes_the_maximum_and_the_lowest_id_of_equals() -> None:
    sampler = Sampler(Settings(), 5)
    assert sampler.pick(np.array([0, 3, 1, 3, 2], np.float32), NOTHING) == 1


def test_greedy_has_no_processors() -> None:
    # top-k, top-p and min-p never remove the maximum
    assert build_processors(Settings(top_k=3, top_p=0.5, min_p=0.2), 10) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_values_that_are_not_finite_are_an_error_and_never_token_0(
    bad: float, temperature: float
) -> None:
    row = np.zeros(6, np.float32)
    row[4] = bad
    sampler = Sampler(Settings(temperature=temperature), 6)
    with pytest.raises(NumericsError, match=r"position 3 .*token 4 "):
        sampler.pick(row, History((1, 2, 3), 3))


def test_top_k_keeps_exactly_k_and_prefers_low_ids_among_equals() -> None:
    row = [1.0, 5.0, 5.0, 5.0, 9.0]
    assert survivors(row, temperature=1, top_k=3) == [1, 2, 4]
    assert survivors(row, temperature=1, top_k=1) == [4]
    assert survivors(row, temperature=1, top_k=9) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_fewest_that_add_up() -> None:
    row = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
    assert survivors(row, temperature=1, top_p=0.39) == [1]
    assert survivors(row, temperature=1, top_p=0.41) == [1, 3]
    assert survivors(row, temperature=1, top_p=0.71) == [1, 2, 3]
    assert survivors(row, temperature=1, top_p=1.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.05, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(spread: float, p: float) -> None:
    row = np.random.default_rng(5).normal(size=5000) * spread
    probability = softmax(row)
    order = sorted(range(5000), key=lambda i: (-probability[i], i))
    total, expected = 0.0, []
    for token in order:
        expected.append(token)
        total += probability[token]
        if total >= p:
            break
    got = survivors(row.tolist(), temperature=1, top_p=p)
    # the running sum may round to the other side at the very edge
    assert abs(len(got) - len(expected)) <= 1
    edge = {expected[-1], order[len(expected)]} if len(expected) < 5000 else {expected[-1]}
    assert set(got) ^ set(expected) <= edge


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = np.log([0.5, 0.26, 0.24]).tolist()
    assert survivors(row, temperature=1, min_p=0.5) == [0, 1]


def test_temperature_divides_logits() -> None:
    row = [1.0, 2.0, 4.0]
    expected = softmax(np.array(row) / 0.7)
    np.testing.assert_allclose(softmax(kept(row, temperature=0.7)), expected, rtol=1e-12)


def test_a_tiny_temperature_is_greedy() -> None:
    sampler = Sampler(Settings(temperature=1e-320, seed=1), 3)
    assert sampler.pick(np.array([1, 9, 2], np.float32), NOTHING) == 1


def test_penalties() -> None:
    # repetition counts prompt and answer; frequency and presence the answer only
    history = History((0, 1, 2, 2, 3), 2)
    row = [2.0, -2.0, 2.0, -2.0, 1.0]
    np.testing.assert_allclose(kept(row, history, repeat_penalty=2), [1, -4, 1, -4, 1])
    np.testing.assert_allclose(kept(row, history, frequency_penalty=0.5), [2, -2, 1, -2.5, 1])
    np.testing.assert_allclose(kept(row, history, presence_penalty=0.5), [2, -2, 1.5, -2.5, 1])


def test_logit_bias_is_added_and_checked() -> None:
    np.testing.assert_allclose(kept([0, 0, 0], logit_bias={2: 1.5, 0: -3}), [-3, 0, 1.5])
    with pytest.raises(SettingError, match="token 3 is outside the vocabulary of 3"):
        Sampler(Settings(logit_bias={3: 1.0}), 3)


def chi_square_limit(degrees: int) -> float:
    """Upper 1e-4 quantile, Wilson and Hilferty's approximation."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "logit_bias": {3: 1.0}},
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, object]) -> None:
    row = np.random.default_rng(2).normal(size=12).astype(np.float32)
    sampler = Sampler(Settings(seed=11, **settings), 12)
    n = 6000
    counts = np.zeros(12)
    for position in range(n):
        counts[sampler.pick(row, History(range(position), 0))] += 1
    expected = n * softmax(kept(row.tolist(), **settings))
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < chi_square_limit(int(possible.sum()) - 1)


def test_draws_depend_on_seed_and_position_alone() -> None:
    draws = [uniform(3, position) for position in range(200)]
    assert draws == [uniform(3, position) for position in range(200)]
    assert len(set(draws)) == 200
    assert not set(draws) & {uniform(4, position) for position in range(200)}
    # successive draws are not correlated: |r| of 200 independent pairs exceeds 0.3 once in 50,000
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.3


def test_the_same_seed_gives_the_same_pick_whatever_was_picked_before() -> None:
    row = np.random.default_rng(0).normal(size=40).astype(np.float32)
    picks = []
    for warm_up in (0, 7):
        sampler = Sampler(Settings(temperature=1, seed=5), 40)
        for position in range(warm_up):
            sampler.pick(row, History(range(position), 0))
        picks.append(sampler.pick(row, History(range(9), 0)))
    assert picks[0] == picks[1]


def test_random_seeds_differ_and_are_known() -> None:
    row = np.zeros(1000, np.float32)
    first, second = (Sampler(Settings(temperature=1), 1000) for _ in range(2))
    assert first.seed != second.seed
    again = Sampler(Settings(temperature=1, seed=first.seed), 1000)
    assert again.pick(row, NOTHING) == first.pick(row, NOTHING)


def test_the_last_quantile_never_hits_a_removed_token() -> None:
    row = np.array([0.0, 1.0, -np.inf, -np.inf])
    assert draw(row, 1.0) == 1
    assert draw(row, 0.0) == 0


def test_rows_are_left_alone() -> None:
    row = np.arange(5, dtype=np.float32)
    Sampler(Settings(temperature=1, top_k=2, logit_bias={0: 4}), 5).pick(row, NOTHING)
    np.testing.assert_array_equal(row, np.arange(5))
