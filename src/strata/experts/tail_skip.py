"""Which missed experts are not computed at all: the rule that the route tail skip adds to the plan.

A missed expert that every token of the window which chose it holds at rank ``tail_rank`` or behind
(rank 0 is the router's first choice) is neither read nor computed; its rows count as zero, and the
other weights stay as they are. It goes before the rules that share missed experts out.
"""

from __future__ import annotations

import numpy as np

from strata.core.types import Place
from strata.kernels.plan import Draft, Rule


def tail_rule(tail_rank: int) -> Rule:
    """Moves CPU experts to SKIPPED. tail_rank: at least 1; equals ``kernels.plan.triton``'s."""

    def rule(draft: Draft) -> None:
        rank_R = np.arange(len(draft.group_R)) % draft.n_active
        wanted_G = np.zeros(len(draft.place_G), dtype=bool)
        wanted_G[draft.group_R[rank_R < tail_rank]] = True
        draft.place_G[(draft.place_G == Place.CPU) & ~wanted_G] = Place.SKIPPED

    return rule
