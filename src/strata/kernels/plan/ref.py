"""The plan in NumPy: the truth, and what runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.core.types import Place

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass
class Draft:
    """A plan in the making. Rules change ``place_G`` only."""

    layer: int
    expert_R: I32
    weight_R: F32
    n_active: int
    expert_G: I32
    """Distinct experts in order of first appearance."""
    group_R: I32
    """Group of each row."""
    place_G: npt.NDArray[np.int8]


Rule = Callable[[Draft], None]


@dataclass(frozen=True)
class Groups:
    """Rows of one place by expert: entries start[g]..start[g+1] belong to expert_G[g]."""

    expert_G: I32
    start: I32
    row: I32
    token: I32

    @property
    def n_rows(self) -> int:
        """Routed rows in all groups."""
        return len(self.row)


@dataclass(frozen=True)
class Plan:
    """Places of one layer's routed rows. Every row has exactly one place."""

    place_R: npt.NDArray[np.int8]
    groups: Mapping[Place, Groups]

    def count(self, place: Place) -> int:
        """Rows computed at a place."""
        groups = self.groups.get(place)
        return groups.n_rows if groups else 0


def make_plan(
    layer: int,
    expert_R: I32,
    weight_R: F32,
    n_active: int,
    fast_addr_E: I64,
    rules: Sequence[Rule] = (),
) -> Plan:
    """See the package docstring. R = len(expert_R); n_active = K."""
    distinct, first, inverse = np.unique(expert_R, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    expert_G = distinct[order].astype(np.int32)
    group_R = rank[inverse].astype(np.int32)
    place_G = np.where(fast_addr_E[expert_G] != 0, Place.FAST, Place.CPU).astype(np.int8)
    draft = Draft(layer, expert_R, weight_R, n_active, expert_G, group_R, place_G)
    for rule in rules:
        rule(draft)
    return _finish(draft)


def _finish(draft: Draft) -> Plan:
    place_R = draft.place_G[draft.group_R]
    by_group = np.argsort(draft.group_R, kind="stable").astype(np.int32)
    n_G = np.bincount(draft.group_R, minlength=len(draft.expert_G))
    ends = np.cumsum(n_G)
    groups: dict[Place, Groups] = {}
    for code in np.unique(draft.place_G):
        chosen = np.flatnonzero(draft.place_G == code)
        row = np.concatenate([by_group[ends[g] - n_G[g] : ends[g]] for g in chosen])
        start = np.concatenate([[0], np.cumsum(n_G[chosen])]).astype(np.int32)
        token = (row // draft.n_active).astype(np.int32)
        groups[Place(int(code))] = Groups(draft.expert_G[chosen], start, row, token)
    return Plan(place_R, groups)
