"""The host's side of a window: answers each ring by handing the plan's rows to the workers of their
places.

It has no idea which features are on: places that a plan does not use get no work, whoever made the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from strata.core.types import Place
from strata.experts.fast_tier import FastTier
from strata.experts.late import LateBelow
from strata.experts.workers import Worker
from strata.kernels.plan import Plan, Rule
from strata.kernels.plan.native import Planner


@dataclass
class RowCounters:
    """Routed rows and distinct experts of windows by place since the start, per layer."""

    rows_LP: dict[tuple[int, Place], int] = field(default_factory=dict)
    experts_LP: dict[tuple[int, Place], int] = field(default_factory=dict)

    def add(self, layer: int, plan: Plan) -> None:
        """Count one layer of one window."""
        for place, groups in plan.groups.items():
            key = (layer, place)
            self.rows_LP[key] = self.rows_LP.get(key, 0) + groups.n_rows
            self.experts_LP[key] = self.experts_LP.get(key, 0) + len(groups.expert_G)

    def total(self, place: Place) -> int:
        """Rows at a place over all layers."""
        return sum(n for (_, p), n in self.rows_LP.items() if p == place)

    def experts(self, place: Place) -> int:
        """Distinct experts at a place, summed over layers and windows."""
        return sum(n for (_, p), n in self.experts_LP.items() if p == place)

    def clear(self) -> None:
        """Count from zero."""
        self.rows_LP.clear()
        self.experts_LP.clear()

    def lines(self) -> list[str]:
        """What was left out since the start, for people."""
        rows, experts = self.total(Place.SKIPPED), self.experts(Place.SKIPPED)
        if not rows:
            return []
        return [
            f"route tail skip: {experts} missed experts skipped ({rows} entries) since the start"
        ]


class ExpertService:
    """Plans a layer, starts its workers at the ring, and joins them at the waits.

    workers: who computes each place; the host places (CPU, CPU_LATE, REMOTE) start at the ring in
    the order given,
    FAST rows run when the window reaches them.
    """

    HOST_PLACES = (Place.REMOTE, Place.CPU, Place.CPU_LATE)

    def __init__(self, tier: FastTier, workers: Mapping[Place, Worker]) -> None:
        self.tier = tier
        self.workers = dict(workers)
        self.counters = RowCounters()
        self.late_below = LateBelow()
        self.on_plan: Callable[[int], None] | None = None
        """Called with each layer that is planned: a sign of life, and the place to break off."""
        self._plans: dict[int, Plan] = {}
        self._planner = Planner()

    def plan(
        self,
        layer: int,
        expert_R: torch.Tensor,
        weight_R: torch.Tensor,
        n_active: int,
        rules: Sequence[Rule] = (),
    ) -> Plan:
        """Give every routed row of the layer its place."""
        if self.on_plan is not None:
            self.on_plan(layer)
        fast_addr_E = self.tier.address_LE[layer]
        plan = self._planner.plan(layer, expert_R, weight_R, n_active, fast_addr_E, rules)
        self._plans[layer] = plan
        self.counters.add(layer, plan)
        return plan

    def of(self, layer: int) -> Plan:
        """The plan of the layer in the running window."""
        return self._plans[layer]

    def experts_of(self, layer: int) -> npt.NDArray[np.int32]:
        """Experts of the layer's rows in the last window, in any order."""
        groups = self._plans[layer].groups.values()
        return np.concatenate([np.repeat(g.expert_G, np.diff(g.start)) for g in groups])

    def rows_used(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(layer, expert) of every routed row of the last window, rows of a layer together."""
        experts = [self.experts_of(layer) for layer in self._plans]
        sizes = [len(expert_R) for expert_R in experts]
        layers = np.repeat(np.fromiter(self._plans, np.int32, len(sizes)), sizes)
        return layers, np.concatenate(experts)

    def ring(self, layer: int, x_TD: torch.Tensor, rows: Mapping[Place, torch.Tensor]) -> None:
        """Start the workers of the host places; ``rows`` says where each place's rows go."""
        plan = self._plans[layer]
        for place in self.HOST_PLACES:
            groups = plan.groups.get(place)
            if groups is not None:
                self.workers[place].begin(layer, groups, x_TD, rows[place])

    def wait(self, layer: int, place: Place) -> None:
        """Return when the rows of that place are written."""
        worker = self.workers.get(place)
        if worker is not None:
            worker.finish(layer)

    def fast_rows(self, layer: int, x_TD: torch.Tensor, out_RD: torch.Tensor) -> None:
        """Compute the cached experts' rows now."""
        groups = self._plans[layer].groups.get(Place.FAST)
        if groups is not None:
            worker = self.workers[Place.FAST]
            worker.begin(layer, groups, x_TD, out_RD)
            worker.finish(layer)

    def drain(self) -> None:
        """After an error: wait until no worker touches a buffer any more."""
        for worker in self.workers.values():
            for layer in range(len(self.tier.address_LE)):
                worker.finish(layer)
