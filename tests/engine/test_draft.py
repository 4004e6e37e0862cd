"""Drafters against a search written out plainly, and by hand."""

from __future__ import annotations

import random

import pytest

from strata.core.settings import Settings
from strata.engine.draft import LookupDrafter, NoDrafter, ScriptedDrafter, build_drafter


def plain_search(text: list[int], n: int, shortest: int, longest: int) -> list[int]:
    """The longest earlier copy of the end, the latest of equals, read off one position at a
    time.
    """
    best, best_start = 0, None
    for start in range(1, len(text)):  # copy ends before `start`
        length = 0
        while (
            length < longest
            and start - 1 - length >= 0
            and text[start - 1 - length] == text[len(text) - 1 - length]
        ):
            length += 1
        if length >= shortest and length >= best:
            best, best_start = length, start
    if best_start is None:
        return []
    out = list(text)
    for i in range(n):
        out.append(out[best_start + i])
    return out[len(text) :]


@pytest.mark.parametrize("seed", range(40))
def test_lookup_finds_the_longest_earlier_copy(seed: int) -> None:
    rng = random.Random(seed)
    shortest, longest = rng.choice([(1, 4), (2, 5), (3, 16)])
    drafter = LookupDrafter(shortest, longest)
    text = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
    drafter.begin(text)
    for _ in range(30):
        n = rng.randrange(1, 8)
        assert drafter.propose(n) == plain_search(text, n, shortest, longest)
        added = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        text += added
        drafter.extend(added)


def test_lookup_prefers_the_longer_copy_to_the_later_one() -> None:
    drafter = LookupDrafter(2, 8)
    #             |longer copy|     |later, shorter|   end
    drafter.begin([5, 1, 2, 3, 70, 9, 2, 3, 80, 6, 5, 1, 2, 3])
    assert drafter.propose(1) == [70]


def test_lookup_continues_a_period() -> None:
    drafter = LookupDrafter()
    drafter.begin([9, 1, 2, 1, 2, 1, 2])
    assert drafter.propose(5) == [1, 2, 1, 2, 1]


def test_lookup_is_silent_without_a_copy_and_after_a_new_beginning() -> None:
    drafter = LookupDrafter()
    drafter.begin(list(range(100)) + [0, 1, 2])
    assert drafter.propose(2) == [3, 4]
    drafter.begin([0, 1, 2])
    assert drafter.propose(2) == []
    drafter.begin([])
    assert drafter.propose(2) == []


def test_scripted_follows_position_sizes_and_vocabulary() -> None:
    drafter = ScriptedDrafter([10, 11, 12, 13, 14], sizes=[2, 0])
    drafter.begin([10])
    assert drafter.propose(3) == [11, 12]
    assert drafter.propose(3) == []
    drafter.extend([11, 12])
    assert drafter.propose(3) == [13, 14]
    limited = ScriptedDrafter([10, 11, 99, 12], vocabulary=frozenset({10, 11, 12}))
    limited.begin([10])
    assert limited.propose(3) == [11]


def test_drafters_by_setting() -> None:
    assert isinstance(build_drafter(Settings(spec=4, draft="lookup")), LookupDrafter)
    assert isinstance(build_drafter(Settings(draft="none")), NoDrafter)
    assert build_drafter(Settings(draft="none")).propose(3) == []
