"""Which CPU rows are late: the rule that deferral adds to the plan.

A row's share is its routing weight over the token's sum of weights. Rows with a share of ``below``
or more stay on time;
a distinct expert is on time if any of its rows is, so that its weights are read once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strata.core.types import Place
from strata.kernels.plan import Draft, Rule


def late_rule(layers: Iterable[int], below: float | None) -> Rule:
    """Moves CPU experts of the given layers to CPU_LATE; below None: all of them."""
    chosen = frozenset(layers)

    def rule(draft: Draft) -> None:
        if draft.layer not in chosen:
            return
        late_G = draft.place_G == Place.CPU
        if below is not None:
            weight_TK = draft.weight_R.reshape(-1, draft.n_active).astype(np.float64)
            share_R = (weight_TK / weight_TK.sum(axis=1, keepdims=True)).reshape(-1)
            heavy_G = np.zeros(len(draft.place_G), dtype=bool)
            heavy_G[draft.group_R[share_R >= below]] = True
            late_G &= ~heavy_G
        draft.place_G[late_G] = Place.CPU_LATE

    return rule
