"""The plan by native code where no rule wants to see the draft; the integers of the reference."""

from __future__ import annotations

from collections.abc import Sequence

from strata.core.types import Place
from strata.kernels.plan import ref
from strata.kernels.plan.ref import F32, I32, I64, Groups, Plan, Rule
from strata.native.fused_routing import group_rows


def make_plan(
    layer: int,
    expert_R: I32,
    weight_R: F32,
    n_active: int,
    fast_addr_E: I64,
    rules: Sequence[Rule] = (),
) -> Plan:
    """See the package docstring. EngineError for an expert that does not exist."""
    if rules:
        return ref.make_plan(layer, expert_R, weight_R, n_active, fast_addr_E, rules)
    place_R, fast, others = group_rows(expert_R, n_active, fast_addr_E, Place.FAST, Place.CPU)
    groups: dict[Place, Groups] = {}
    if len(fast.expert):
        groups[Place.FAST] = Groups(*fast)
    if len(others.expert):
        groups[Place.CPU] = Groups(*others)
    return Plan(place_R, groups)
