"""Which CPU rows are late: the rule that deferral adds to the plan.

A row's share is its routing weight over the token's sum of weights. Rows with a share of ``below``
or more stay on time;
a distinct expert is on time if any of its rows is, so that its weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from strata.core.errors import EngineError
from strata.core.types import Place
from strata.kernels.plan import Draft, Rule

BelowOf = Callable[[int], float]
"""Threshold for windows of so many tokens."""


class LateBelow:
    """Thresholds that were worked out when the engine started, by window size; fixed afterwards.

    A size that was not looked at goes by the next smaller one, or the smallest.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, float] = {}

    def fix(self, n_tokens: int, below: float) -> None:
        """Set a size's threshold: 0 = none late, infinity = all."""
        self._by_size[n_tokens] = below

    @property
    def sizes(self) -> list[int]:
        """Sizes that have one."""
        return sorted(self._by_size)

    def of(self, n_tokens: int) -> float:
        """EngineError when none was fixed: thresholds are never measured in flight."""
        if not self._by_size:
            raise EngineError("--defer-cpu-below auto has no threshold yet; nothing measured it")
        fitting = [size for size in self._by_size if size <= n_tokens]
        return self._by_size[max(fitting) if fitting else min(self._by_size)]


def late_rule(layers: Iterable[int], below: float | BelowOf | None) -> Rule:
    """Moves CPU experts of the given layers to CPU_LATE; below None: all of them."""
    chosen = frozenset(layers)

    def rule(draft: Draft) -> None:
        if draft.layer not in chosen:
            return
        late_G = draft.place_G == Place.CPU
        if below is not None:
            n_tokens = len(draft.expert_R) // draft.n_active
            limit = below(n_tokens) if callable(below) else below
            heavy_G = np.zeros(len(draft.place_G), dtype=bool)
            heavy_G[draft.group_R[row_shares(draft) >= limit]] = True
            late_G &= ~heavy_G
        draft.place_G[late_G] = Place.CPU_LATE

    return rule


def row_shares(draft: Draft) -> npt.NDArray[np.float64]:
    """Each row's share [R] of its token's routing weight."""
    weight_TK = draft.weight_R.reshape(-1, draft.n_active).astype(np.float64)
    return np.asarray((weight_TK / weight_TK.sum(axis=1, keepdims=True)).reshape(-1))
