"""Which experts of a layer a cache keeps: policies that see one access after another.

Each has a fixed number of slots and holds experts by number; nothing is copied here. A simulator
(``strata bench cache``) counts what they would have read, the adaptive cache (``experts/adapt.py``)
moves experts towards what they hold. An expert that is not worth a slot is read past the cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

DECAY, MARGIN = 0.8, 0.2
"""Of decayed frequency by token: a use counts 0.8 after one token, 0.01 after 20. Chosen on made-up
traces (bench/LOG.md); a longer memory reads up to 15 % more."""


class Policy(Protocol):
    """A cache of one layer."""

    def access(self, expert: int) -> bool:
        """A token takes this expert; whether it was held. Updates what is held."""
        ...

    def end_token(self) -> None:
        """All experts of a token were told."""
        ...

    def held(self) -> set[int]:
        """Experts held now; at most as many as there are slots."""
        ...


class Lru:
    """The expert used longest ago goes."""

    def __init__(self, slots: int, first: Sequence[int] = ()) -> None:
        self._slots = slots
        self._held: OrderedDict[int, None] = OrderedDict.fromkeys(first[:slots])

    def access(self, expert: int) -> bool:
        """See Policy."""
        hit = expert in self._held
        if hit:
            self._held.move_to_end(expert)
        elif self._slots:
            if len(self._held) >= self._slots:
                self._held.popitem(last=False)
            self._held[expert] = None
        return hit

    def end_token(self) -> None:
        """Nothing ages."""

    def held(self) -> set[int]:
        """See Policy."""
        return set(self._held)


class Frequency:
    """The expert used least goes, for one used more by a margin. decay 1 is LFU; below, a use
    counts ``decay`` times as much with every token."""

    def __init__(
        self,
        slots: int,
        first: Sequence[int] = (),
        *,
        decay: float = 1.0,
        margin: float = 0.0,
    ) -> None:
        self._slots, self._decay, self._margin = slots, decay, margin
        self._uses: dict[int, float] = {}
        self._held = set(first[:slots])
        # a use now is worth ``_one``, which grows instead of all others falling
        self._one = 1.0

    def access(self, expert: int) -> bool:
        """See Policy."""
        self._uses[expert] = self._uses.get(expert, 0.0) + self._one
        if expert in self._held:
            return True
        if len(self._held) < self._slots:
            self._held.add(expert)
        elif self._slots:
            uses = self._uses
            least = min(self._held, key=lambda e: (uses.get(e, 0.0), e))
            if uses[expert] > uses.get(least, 0.0) + self._margin * self._one:
                self._held.remove(least)
                self._held.add(expert)
        return False

    def end_token(self) -> None:
        """Earlier uses lose weight."""
        self._one /= self._decay
        if self._one > 1e12:
            self._uses = {e: n / self._one for e, n in self._uses.items()}
            self._one = 1.0

    def held(self) -> set[int]:
        """See Policy."""
        return set(self._held)


class S3Fifo:
    """Three queues (Yang et al., SOSP 2023): new experts pass a small queue and stay only when used
    again; those that left it early are remembered, and go straight to the main queue."""

    def __init__(self, slots: int, first: Sequence[int] = ()) -> None:
        self._small_slots = max(1, slots // 10) if slots else 0
        self._slots = slots
        self._small: deque[int] = deque()
        self._main: deque[int] = deque(first[:slots])
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = dict.fromkeys(first[:slots], 0)

    def access(self, expert: int) -> bool:
        """See Policy."""
        if expert in self._uses:
            self._uses[expert] = min(self._uses[expert] + 1, 3)
            return True
        if not self._slots:
            return False
        while len(self._small) + len(self._main) >= self._slots:
            self._make_room()
        known = expert in self._ghost
        if known:
            del self._ghost[expert]
        (self._main if known else self._small).append(expert)
        self._uses[expert] = 0
        return False

    def _make_room(self) -> None:
        if len(self._small) >= self._small_slots or not self._main:
            expert = self._small.popleft()
            if self._uses[expert] > 0:
                self._uses[expert] = 0
                self._main.append(expert)
                return
            self._ghost[expert] = None
            if len(self._ghost) > self._slots:
                self._ghost.popitem(last=False)
        else:
            expert = self._main.popleft()
            if self._uses[expert] > 0:
                self._uses[expert] -= 1
                self._main.append(expert)
                return
        del self._uses[expert]

    def end_token(self) -> None:
        """Nothing ages by itself."""

    def held(self) -> set[int]:
        """See Policy."""
        return set(self._uses)


def _lfu(slots: int, first: Sequence[int] = ()) -> Policy:
    return Frequency(slots, first)


def _decayed(slots: int, first: Sequence[int] = ()) -> Policy:
    return Frequency(slots, first, decay=DECAY, margin=MARGIN)


POLICIES: Mapping[str, Callable[[int, Sequence[int]], Policy]] = {
    "lru": Lru,
    "lfu": _lfu,
    "decayed": _decayed,
    "s3fifo": S3Fifo,
}
"""By the name of --adapt-policy: (slots, experts held at first, best first) -> Policy."""


def belady_hits(
    tokens: Sequence[Sequence[int]], slots: int, first: Sequence[int] = (), count_from: int = 0
) -> int:
    """Hits of the best cache there could be, which knows the future (Belady, with bypass): it keeps
    the experts that are used again soonest. tokens: experts of each token; hits count from token
    ``count_from`` on."""
    flat = [expert for token in tokens for expert in token]
    never = len(flat)
    next_use = [never] * len(flat)
    seen: dict[int, int] = {}
    for i in range(len(flat) - 1, -1, -1):
        next_use[i] = seen.get(flat[i], never)
        seen[flat[i]] = i
    held = {e: seen.get(e, never) for e in first[:slots]}
    counted = sum(len(token) for token in tokens[:count_from])
    hits = 0
    for i, expert in enumerate(flat):
        if expert in held:
            hits += i >= counted
            held[expert] = next_use[i]
        elif len(held) < slots:
            held[expert] = next_use[i]
        elif slots:
            last = max(held, key=lambda e: (held[e], e))
            if held[last] > next_use[i]:
                del held[last]
                held[expert] = next_use[i]
    return hits
