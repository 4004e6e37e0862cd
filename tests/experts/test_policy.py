"""Cache policies on short sequences worked out by hand, and against the best there could be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from strata.experts.policy import POLICIES, Frequency, Lru, S3Fifo, belady_hits


def hits(policy: object, accesses: list[int]) -> list[bool]:
    """Every access its own token."""
    found = []
    for expert in accesses:
        found.append(policy.access(expert))  # type: ignore[attr-defined]
        policy.end_token()  # type: ignore[attr-defined]
    return found


def test_lru_by_hand() -> None:
    """2 slots: 1 2 fill; 1 hits; 3 pushes 2 out; 2 pushes 1 out."""
    policy = Lru(2)
    assert hits(policy, [1, 2, 1, 3, 2]) == [False, False, True, False, False]
    assert policy.held() == {3, 2}


def test_lfu_keeps_what_was_used_more() -> None:
    """3 and 4, used once each, do not push out 1 and 2, used twice; 3 does after its third use."""
    policy = Frequency(2)
    assert hits(policy, [1, 1, 2, 2, 3, 4]) == [False, True, False, True, False, False]
    assert policy.held() == {1, 2}
    hits(policy, [3, 3])
    assert 3 in policy.held() and len(policy.held()) == 2


def test_decay_forgets() -> None:
    """Uses of 1 halve with every token: 5 uses are 0.97 when 2 was used, and weigh less than its
    second use; LFU would keep 1."""
    fast, lfu = Frequency(1, decay=0.5), Frequency(1)
    for policy in (fast, lfu):
        hits(policy, [1, 1, 1, 1, 1, 2, 2])
    assert fast.held() == {2} and lfu.held() == {1}


def test_a_margin_holds_back() -> None:
    """With a margin of 2 an expert must be used 3 times more."""
    policy = Frequency(1, margin=2.0)
    hits(policy, [1, 2, 2, 2])
    assert policy.held() == {1}
    hits(policy, [2])
    assert policy.held() == {2}


def test_s3fifo_lets_single_uses_pass_by() -> None:
    """9 of 10 slots hold experts used again; a scan of single uses leaves them there, where LRU
    loses all."""
    s3, lru = S3Fifo(10), Lru(10)
    warm = [e for e in range(9) for _ in range(3)]
    for policy in (s3, lru):
        hits(policy, [*warm, *range(100, 120)])
    assert len(s3.held() & set(range(9))) == 9
    assert not lru.held() & set(range(9))
    # what left the small queue a moment ago goes straight to the main one
    assert hits(S3Fifo(2), [1, 2, 3, 1, 1]) == [False, False, False, False, True]


def best_by_trying(tokens: list[list[int]], slots: int) -> int:
    """Most hits over all ways of keeping what was there and what was read."""
    flat = [e for token in tokens for e in token]
    states = {frozenset(): 0}
    for expert in flat:
        after: dict[frozenset[int], int] = {}
        for held, n in states.items():
            n += expert in held
            for size in range(slots + 1):
                for kept in itertools.combinations(sorted(held | {expert}), size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), n)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_best_there_is(seed: int) -> None:
    """Equal to trying every choice on 12 accesses of 5 experts; and no policy beats it."""
    rng = np.random.default_rng(seed)
    tokens = [[int(e)] for e in rng.integers(0, 5, 12)]
    for slots in (1, 2, 3):
        best = belady_hits(tokens, slots)
        assert best == best_by_trying(tokens, slots)
        for make in POLICIES.values():
            assert sum(hits(make(slots, ()), [t[0] for t in tokens])) <= best


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("slots", [0, 1, 7])
def test_a_policy_holds_no_more_than_its_slots(name: str, slots: int) -> None:
    rng = np.random.default_rng(1)
    policy = POLICIES[name](slots, range(20))
    assert policy.held() == set(range(slots))
    for expert in rng.zipf(1.3, 400) % 30:
        held = policy.held()
        assert policy.access(int(expert)) == (expert in held)
        assert len(policy.held()) <= slots
        policy.end_token()
