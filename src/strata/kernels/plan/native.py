"""The plan by native code where no rule wants to see the draft; the integers of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strata.core.types import Place
from strata.kernels.plan import ref
from strata.kernels.plan.ref import I64, Groups, Plan, Rule
from strata.native.fused_routing import RowGrouper


class Planner:
    """Makes the plans of one engine."""

    def __init__(self) -> None:
        self._grouper = RowGrouper()

    def plan(
        self,
        layer: int,
        expert_R: torch.Tensor,
        weight_R: torch.Tensor,
        n_active: int,
        fast_addr_E: I64,
        rules: Sequence[Rule] = (),
    ) -> Plan:
        """``make_plan``; fast_addr_E lives on and changes in place.

        EngineError for an expert that does not exist.
        """
        if rules:
            weight = weight_R.to(torch.float32).numpy()
            return ref.make_plan(layer, expert_R.numpy(), weight, n_active, fast_addr_E, rules)
        place_R, fast, others = self._grouper.group(
            expert_R, n_active, fast_addr_E, Place.FAST, Place.CPU
        )
        groups: dict[Place, Groups] = {}
        if len(fast.expert):
            groups[Place.FAST] = Groups(*fast)
        if len(others.expert):
            groups[Place.CPU] = Groups(*others)
        return Plan(place_R, groups)
