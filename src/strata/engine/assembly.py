"""Pieces that engines on every device are put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import InputError
from strata.core.settings import Settings
from strata.core.types import Place
from strata.engine.checkpoint_plan import CheckpointPlan
from strata.experts.fast_tier import FastTier, Pair, even_profile, read_profile
from strata.experts.nodes import tell_pool
from strata.experts.store import ExpertStore
from strata.experts.workers import PlainWorker, PoolWorker, Worker
from strata.formats.tokenizer import Tokenizer, load_tokenizer
from strata.native import CpuPool


def tokenizer_of(plan: CheckpointPlan) -> Tokenizer | InputError:
    """The tokenizer, or why there is none: token ids can be read without it, so the error waits
    until text is used."""
    try:
        return load_tokenizer(plan.checkpoint)
    except InputError as error:
        return error


def workers_of(
    settings: Settings, store: ExpertStore, tier: FastTier, pool: CpuPool
) -> Mapping[Place, Worker]:
    """Who computes the rows of each place on the CPU."""
    if settings.dtype == "float64":
        plain = PlainWorker(store, torch.float64)
        return {Place.FAST: plain, Place.CPU: plain, Place.CPU_LATE: plain}
    tell_pool(pool, store)
    home = [g.addresses() if g is not None else np.empty(0, np.int64) for g in store.layers]

    def at_home(layer: int, expert_G: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        store.layer(layer).will_need(expert_G)
        return home[layer][expert_G]

    return {
        Place.FAST: PoolWorker(pool, store, lambda layer, e: tier.address_LE[layer][e]),
        Place.CPU: PoolWorker(pool, store, at_home),
        Place.CPU_LATE: PoolWorker(pool, store, at_home, late=True),
    }


def fast_tier_of(
    plan: CheckpointPlan,
    settings: Settings,
    store: ExpertStore,
    n_slots: int,
    device: torch.device | None = None,
) -> FastTier:
    """The fast tier with its first experts: as the profile ranks them, or evenly over layers."""
    tier = FastTier(store, n_slots, device)
    tier.impose(first_experts(settings, plan.n_experts_L, n_slots))
    return tier


def first_experts(settings: Settings, n_experts_L: Sequence[int], n_slots: int) -> list[Pair]:
    """The pairs that so many slots hold at first."""
    if not n_slots:
        return []
    if settings.expert_profile is not None:
        return read_profile(settings.expert_profile, n_experts_L)[:n_slots]
    return even_profile(n_experts_L)[:n_slots]
