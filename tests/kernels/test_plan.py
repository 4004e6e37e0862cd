"""The plan against its definition, restated here row by row with plain loops over random
routings."""

from __future__ import annotations

import numpy as np
import pytest

from strata.core.types import Place
from strata.kernels.plan import Draft, make_plan


def random_routing(rng: np.random.Generator, n_tokens: int, n_active: int, n_experts: int):
    expert = np.concatenate([rng.permutation(n_experts)[:n_active] for _ in range(n_tokens)])
    weight = np.sort(rng.random((n_tokens, n_active)))[:, ::-1].reshape(-1)
    return expert.astype(np.int32), weight.astype(np.float32)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_one_place_and_one_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_tokens, n_active, n_experts = int(rng.integers(1, 9)), int(rng.integers(1, 7)), 16
    expert, weight = random_routing(rng, n_tokens, n_active, n_experts)
    address = np.where(rng.random(n_experts) < 0.4, 4096, 0).astype(np.int64)
    plan = make_plan(0, expert, weight, n_active, address)
    assert [Place(p) for p in plan.place_R] == [
        Place.FAST if address[e] else Place.CPU for e in expert
    ]
    seen: dict[int, tuple[int, int]] = {}
    for place, groups in plan.groups.items():
        first = [int(np.flatnonzero(expert == e)[0]) for e in groups.expert_G]
        assert first == sorted(first), "groups stand in order of first appearance"
        for g, e in enumerate(groups.expert_G):
            rows = groups.row[groups.start[g] : groups.start[g + 1]]
            assert list(rows) == list(np.flatnonzero(expert == e)), "a group holds all its rows"
            for row in rows:
                assert int(row) not in seen
                seen[int(row)] = (int(place), int(e))
        assert list(groups.token) == [int(r) // n_active for r in groups.row]
    assert sorted(seen) == list(range(n_tokens * n_active))
    assert sum(plan.count(p) for p in Place) == n_tokens * n_active


def test_rules_move_whole_experts() -> None:
    """A rule sees groups, so rows of one expert cannot be torn apart."""
    expert = np.array([3, 5, 5, 3], dtype=np.int32)

    def late_five(draft: Draft) -> None:
        assert draft.layer == 7
        draft.place_G[draft.expert_G == 5] = Place.CPU_LATE

    plan = make_plan(7, expert, np.ones(4, np.float32), 2, np.zeros(8, np.int64), [late_five])
    assert plan.place_R.tolist() == [Place.CPU, Place.CPU_LATE, Place.CPU_LATE, Place.CPU]
    assert plan.count(Place.CPU_LATE) == 2
