"""The adaptive cache: between windows, experts that are used more take the slots of those used
less. Results do not change by a bit, because where a row is computed never does.

``UseCounts`` counts uses of all layers at once (decayed frequency with a margin, the default);
``HeldByPolicy`` lets any policy of ``experts/policy.py`` say what should be held. ``Adapter`` moves
at most so many experts each time, those that gain most first, and keeps count of hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from strata.core.errors import InputError
from strata.experts.fast_tier import FastTier, Pair
from strata.experts.policy import POLICIES, Policy

I32 = npt.NDArray[np.int32]
LEAST_USES, MARGIN = 2.0, 1.5
"""An expert comes in from so many (decayed) uses, and with so many more than the one that goes."""


class UsesExperts(Protocol):
    """A service, on whatever device."""

    def experts_of(self, layer: int) -> I32:
        """Experts of the layer's rows in the last window, in any order."""
        ...


class Swap(NamedTuple):
    """``gain``: what the swap is worth beside others."""

    gain: float
    layer: int
    goes: int
    comes: int


class Ranking(Protocol):
    """Who should be held, by use."""

    def observe(self, layer: int, expert_R: I32) -> None:
        """The rows of a layer in one window."""
        ...

    def swaps(self, layer: int, held_E: npt.NDArray[np.bool_]) -> list[Swap]:
        """Exchanges worth making in a layer, best first."""
        ...

    def end_round(self) -> None:
        """Swaps were made; earlier uses may lose weight."""
        ...


class UseCounts:
    """Decayed uses of every expert; ``decay`` once a round."""

    def __init__(self, n_experts_L: Sequence[int], decay: float) -> None:
        self._decay = decay
        self._uses = [np.zeros(n, np.float32) for n in n_experts_L]

    def observe(self, layer: int, expert_R: I32) -> None:
        """See Ranking."""
        np.add.at(self._uses[layer], expert_R, np.float32(1))

    def swaps(self, layer: int, held_E: npt.NDArray[np.bool_]) -> list[Swap]:
        """See Ranking."""
        uses = self._uses[layer]
        outside = np.flatnonzero(~held_E & (uses >= LEAST_USES))
        inside = np.flatnonzero(held_E)
        comes = outside[np.argsort(-uses[outside], kind="stable")]
        goes = inside[np.argsort(uses[inside], kind="stable")]
        n = min(len(comes), len(goes))
        gain = uses[comes[:n]] - uses[goes[:n]]
        return [
            Swap(float(g), layer, int(out), int(into))
            for g, out, into in zip(gain, goes, comes, strict=False)
            if g >= MARGIN
        ]

    def end_round(self) -> None:
        """See Ranking."""
        for uses in self._uses:
            uses *= self._decay


class HeldByPolicy:
    """What a policy per layer holds, told every row; slower than counting."""

    def __init__(self, name: str, held_L: Sequence[Sequence[int]]) -> None:
        self._policies: list[Policy] = [POLICIES[name](len(held), held) for held in held_L]

    def observe(self, layer: int, expert_R: I32) -> None:
        """See Ranking."""
        policy = self._policies[layer]
        for expert in expert_R.tolist():
            policy.access(expert)
        policy.end_token()

    def swaps(self, layer: int, held_E: npt.NDArray[np.bool_]) -> list[Swap]:
        """See Ranking."""
        wanted = self._policies[layer].held()
        held = set(np.flatnonzero(held_E).tolist())
        pairs = zip(sorted(held - wanted), sorted(wanted - held), strict=False)
        return [Swap(1.0, layer, goes, comes) for goes, comes in pairs]

    def end_round(self) -> None:
        """Policies age by themselves."""


@dataclass
class AdaptCounts:
    """Rows of windows since the start, and how many found their expert in the fast tier."""

    windows: int = 0
    rows: int = 0
    hits: int = 0
    swaps: int = 0

    def line(self) -> str:
        """For people; without a percentage of nothing."""
        if not self.rows:
            return "expert cache: no row was routed yet"
        return (
            f"expert cache: {self.hits / self.rows:.1%} of {self.rows} rows found their expert, "
            f"{self.swaps} experts exchanged in {self.windows} windows"
        )


class Adapter:
    """Called between windows with the experts that the last window used.

    most_swaps: experts exchanged each time; every: windows from one time to the next. profile:
    where ``close`` keeps what was learned.
    """

    def __init__(
        self,
        tier: FastTier,
        ranking: Ranking,
        n_experts_L: Sequence[int],
        *,
        most_swaps: int,
        every: int,
        profile: Path | None = None,
    ) -> None:
        self._tier, self._ranking = tier, ranking
        self._most, self._every = most_swaps, every
        self._total = [np.zeros(n, np.int64) for n in n_experts_L]
        self._profile = profile
        self.counts = AdaptCounts()

    def after_window(self, service: UsesExperts) -> None:
        """The one hook between windows: look at what was used, and exchange when it is time."""
        for layer, uses in enumerate(self._total):
            if len(uses):
                self.observe(layer, service.experts_of(layer))
        self.between_windows()

    def close(self) -> None:
        """Keep the profile, if asked to and anything was learned."""
        if self._profile is not None and self.counts.rows:
            save_profile(self._profile, self.ranked(), self.counts.rows)

    def observe(self, layer: int, expert_R: I32) -> None:
        """The rows of a layer in the window that just ended."""
        self._ranking.observe(layer, expert_R)
        np.add.at(self._total[layer], expert_R, 1)
        self.counts.rows += len(expert_R)
        self.counts.hits += int((self._tier.address_LE[layer][expert_R] != 0).sum())

    def between_windows(self) -> None:
        """A window ended and its layers were observed; nothing reads the fast tier now."""
        self.counts.windows += 1
        if self.counts.windows % self._every or not self._most:
            return
        found: list[Swap] = []
        for layer, addresses in enumerate(self._tier.address_LE):
            if len(addresses):
                found += self._ranking.swaps(layer, addresses != 0)
        found.sort(key=lambda swap: -swap.gain)
        for swap in found[: self._most]:
            self._tier.evict((swap.layer, swap.goes))
            self._tier.insert((swap.layer, swap.comes))
        self.counts.swaps += len(found[: self._most])
        self._ranking.end_round()

    def ranked(self) -> list[Pair]:
        """All experts by their uses since the start, most used first."""
        flat = [
            (-int(n), layer, expert)
            for layer, uses in enumerate(self._total)
            for expert, n in enumerate(uses)
        ]
        return [(layer, expert) for _, layer, expert in sorted(flat)]


def save_profile(path: Path, pairs: Sequence[Pair], rows: int) -> None:
    """Write a profile that ``fast_tier.read_profile`` reads. InputError when it cannot be
    written."""
    text = f"# experts by use in {rows} routed rows: layer expert\n"
    text += "".join(f"{layer} {expert}\n" for layer, expert in pairs)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"expert profile {path}: cannot be written ({error.strerror})") from None
