"""Puts the adaptive cache into an engine, on any device (--adapt-swaps, --expert-profile-save)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.engine.engine import Engine
from strata.experts.adapt import Adapter, HeldByPolicy, Ranking, UseCounts


def adapting(engine: Engine, n_experts_L: Sequence[int]) -> Engine:
    """The engine itself, with an adapter where its settings ask for one.

    n_experts_L: routed experts of each layer.
    """
    settings, tier = engine.settings, engine.service.tier
    asked = settings.adapt_swaps > 0 or settings.expert_profile_save is not None
    if not asked or not any(n_experts_L):
        return engine
    swaps = settings.adapt_swaps if 0 < tier.n_slots < sum(n_experts_L) else 0
    ranking: Ranking = UseCounts(n_experts_L, settings.adapt_decay)
    if settings.adapt_policy != "decayed":
        held = [np.flatnonzero(addresses).tolist() for addresses in tier.address_LE]
        ranking = HeldByPolicy(settings.adapt_policy, held)
    engine.adapter = Adapter(
        tier,
        ranking,
        n_experts_L,
        most_swaps=swaps,
        every=settings.adapt_every,
        profile=settings.expert_profile_save,
    )
    return engine
