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
Bools = npt.NDArray[np.bool_]
LEAST_USES, MARGIN = 2.0, 1.5
"""An expert comes in from so many (decayed) uses, and with so many more than the one that goes."""


class UsesExperts(Protocol):
    """A service, on whatever device."""

    def rows_used(self) -> tuple[I32, I32]:
        """(layer, expert) of every routed row of the last window, rows of a layer together."""
        ...


class Swap(NamedTuple):
    """``gain``: what the swap is worth beside others."""

    gain: float
    layer: int
    goes: int
    comes: int


class Ranking(Protocol):
    """Who should be held, by use."""

    def observe(self, layer_N: I32, expert_N: I32) -> None:
        """The rows of one window."""
        ...

    def swaps(self, held_L: Sequence[Bools]) -> list[Swap]:
        """Exchanges worth making, those of a layer best first."""
        ...

    def end_round(self) -> None:
        """Swaps were made; earlier uses may lose weight."""
        ...


class UseCounts:
    """Decayed uses of every expert; ``decay`` once a round. All layers at once: a window's rows
    cost microseconds."""

    def __init__(self, n_experts_L: Sequence[int], decay: float) -> None:
        self._decay = decay
        self._start = starts(n_experts_L)
        self._uses = np.zeros(sum(n_experts_L), np.float32)

    def observe(self, layer_N: I32, expert_N: I32) -> None:
        """See Ranking."""
        np.add.at(self._uses, self._start[layer_N] + expert_N, np.float32(1))

    def swaps(self, held_L: Sequence[Bools]) -> list[Swap]:
        """See Ranking."""
        wanted = ~np.concatenate(held_L) & (self._uses >= LEAST_USES)
        layers = np.unique(np.searchsorted(self._start, np.flatnonzero(wanted), "right") - 1)
        return [swap for layer in layers.tolist() for swap in self._of(layer, held_L[layer])]

    def _of(self, layer: int, held_E: Bools) -> list[Swap]:
        uses = self._uses[self._start[layer] : self._start[layer] + len(held_E)]
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
        self._uses *= self._decay


class HeldByPolicy:
    """What a policy per layer holds, told every row; slower than counting."""

    def __init__(self, name: str, held_L: Sequence[Sequence[int]]) -> None:
        self._policies: list[Policy] = [POLICIES[name](len(held), held) for held in held_L]

    def observe(self, layer_N: I32, expert_N: I32) -> None:
        """See Ranking."""
        layers = np.asarray(layer_N)
        for layer in np.unique(layers).tolist():
            policy = self._policies[layer]
            for expert in expert_N[layers == layer].tolist():
                policy.access(expert)
            policy.end_token()

    def swaps(self, held_L: Sequence[Bools]) -> list[Swap]:
        """See Ranking."""
        found = []
        for layer, held_E in enumerate(held_L):
            wanted, held = self._policies[layer].held(), set(np.flatnonzero(held_E).tolist())
            pairs = zip(sorted(held - wanted), sorted(wanted - held), strict=False)
            found += [Swap(1.0, layer, goes, comes) for goes, comes in pairs]
        return found

    def end_round(self) -> None:
        """Policies age by themselves."""


def starts(n_experts_L: Sequence[int]) -> npt.NDArray[np.int64]:
    """Number of each layer's first expert, counted through all layers."""
    return np.concatenate([[0], np.cumsum(n_experts_L)])[:-1].astype(np.int64)


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
        self._start, self._n_experts_L = starts(n_experts_L), list(n_experts_L)
        self._total = np.zeros(sum(n_experts_L), np.int64)
        self._held_L: list[Bools] = []
        self._held: Bools = np.zeros(0, np.bool_)
        self._seen = -1
        self._profile = profile
        self.counts = AdaptCounts()

    def after_window(self, service: UsesExperts) -> None:
        """The one hook between windows: look at what was used, and exchange when it is time."""
        self.observe(*service.rows_used())
        self.between_windows()

    def close(self) -> None:
        """Keep the profile, if asked to and anything was learned."""
        if self._profile is not None and self.counts.rows:
            save_profile(self._profile, self.ranked(), self.counts.rows)

    def observe(self, layer_N: I32, expert_N: I32) -> None:
        """The rows of the window that just ended."""
        self._look()
        flat_N = self._start[layer_N] + expert_N
        self._ranking.observe(layer_N, expert_N)
        np.add.at(self._total, flat_N, 1)
        self.counts.rows += len(flat_N)
        self.counts.hits += int(np.count_nonzero(self._held[flat_N]))

    def _look(self) -> None:
        """Who is resident, anew when anybody changed it."""
        if self._seen != self._tier.version:
            self._seen = self._tier.version
            self._held_L = [addresses != 0 for addresses in self._tier.address_LE]
            self._held = np.concatenate(self._held_L)

    def between_windows(self) -> None:
        """A window ended and its rows were observed; nothing reads the fast tier now."""
        self.counts.windows += 1
        if self.counts.windows % self._every or not self._most:
            return
        self._look()
        found = self._ranking.swaps(self._held_L)
        found.sort(key=lambda swap: -swap.gain)
        for swap in found[: self._most]:
            self._tier.evict((swap.layer, swap.goes))
            self._tier.insert((swap.layer, swap.comes))
        self.counts.swaps += len(found[: self._most])
        self._ranking.end_round()

    def uses_of(self, pair: Pair) -> int:
        """Rows of an expert since the start."""
        return int(self._total[self._start[pair[0]] + pair[1]])

    def ranked(self) -> list[Pair]:
        """All experts by their uses since the start, most used first."""
        pairs = [(layer, e) for layer, n in enumerate(self._n_experts_L) for e in range(n)]
        return sorted(pairs, key=lambda pair: -self.uses_of(pair))


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
