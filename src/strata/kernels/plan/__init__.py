"""plan: gives every routed row of one layer exactly one place, and groups the rows by expert.

Inputs
    expert_R    int32 [R], row r = token r // K, rank r % K (rank 0 = heaviest)
    weight_R    float [R] routing weights
    fast_addr_E int64 [E] address of the expert in the fast tier, 0 = not there
    host_addr_E int64 [E] address a device can read in RAM, 0 = none (only needed for PCIE)
    rules       functions (Draft) -> None that move distinct experts between places, in order
Output  Plan: place_R, and for each place its groups (one per distinct expert, in order of first
appearance).
A distinct expert has one place, so its weights are read once for all its rows.
"""

from strata.kernels.plan.ref import Draft, Groups, Plan, Rule, make_plan

__all__ = ["Draft", "Groups", "Plan", "Rule", "make_plan"]
