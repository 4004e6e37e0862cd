"""How many of the missed experts go over the link: found by trying, while windows run.

Which experts the GPU reads over the link changes no bit of the output, so their number may follow
the machine and its load. It comes from two numbers (``Speeds``), for how many ever are missed. Two
pairs are run in turns; the one whose windows are quicker in the middle is kept, then its neighbours
are tried. What is not clearly quicker is never kept. Knows no windows: it is told how long they
took, and what they missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from strata.experts.link_part import MOST_PARTS, Moved, Speeds, fixed_share

TRIES = 10
"""Windows of each pair before they are compared."""
MARGIN = 0.01
"""Part of its time by which a window must be quicker."""
STEPS = (("parts", 48), ("parts", 24), ("parts", 12), ("lead", 2), ("parts", 6), ("lead", 1))
"""What is tried in turn, in both directions."""
AGAIN = 4
"""The step from which neighbours are tried anew after a rest."""
MOST_LEAD = 24
REST_WINDOWS = 400
"""Windows without trying once no neighbour is quicker."""

SOUGHT = -1
"""Instead of a share in 256ths: what is found while windows run."""

Timed = tuple[float, int]
"""Seconds of a window, and the experts that all its layers missed."""


@dataclass
class _Size:
    """What is known for windows of one size."""

    kept: Speeds
    step: int = 0
    other: Speeds | None = None
    queue: list[Speeds] = field(default_factory=list)
    times: tuple[list[Timed], list[Timed]] = field(default_factory=lambda: ([], []))
    turn: int = 0
    rest: int = 0
    seen: set[int] = field(default_factory=set)
    """Numbers of missed experts that a layer had."""
    refused: set[Moved] = field(default_factory=set)
    """What was not quicker than the kept one, for the numbers seen."""


class ShareControl:
    """The numbers for each window size. first: the share in 256ths that is tried first.

    most: experts that a layer can miss. apply: puts the numbers where the plan reads them; called
    only when they change. seeks: whether windows seek them unless they ask for another way; the
    first share is theirs otherwise.
    """

    def __init__(
        self, first: int, most: int, apply: Callable[[Moved], None], seeks: bool = True
    ) -> None:
        self._first, self._start = first, Speeds(first)
        self._most, self._apply = most, apply
        self.seeks = seeks
        self._sizes: dict[int, _Size] = {}
        self._applied: Moved | None = None

    def share(self, n_tokens: int) -> int:
        """The share kept for that size, in 256ths."""
        return self._size(n_tokens).kept.parts

    def kept(self, n_tokens: int) -> Moved:
        """The numbers kept for that size."""
        return self._size(n_tokens).kept.moved(self._most)

    def resting(self, n_tokens: int) -> bool:
        """Whether nothing else is being tried for that size."""
        size = self._size(n_tokens)
        return size.other is None and size.rest > 0

    def restart(self) -> None:
        """Conditions are others now: find the numbers anew, from the smallest size's."""
        if self._sizes:
            self._start = self._sizes[min(self._sizes)].kept
        self._sizes.clear()

    def before(self, n_tokens: int) -> None:
        """A window is about to run that seeks the numbers; ``after`` will be told of it."""
        size = self._size(n_tokens)
        if size.other is None and size.rest == 0:
            self._next_trial(size)
        chosen = size.other if size.other is not None and size.turn % 2 else size.kept
        self._put(chosen.moved(self._most))

    def fix(self, numerator: int) -> None:
        """A window is about to run that must have this share, and is not to be judged by."""
        self._put(fixed_share(numerator, self._most))

    def rest(self) -> None:
        """The same with the first share."""
        self.fix(self._first)

    def after(
        self, n_tokens: int, seconds: float, missed_L: Callable[[], npt.NDArray[np.int64]]
    ) -> None:
        """The window took so long, and missed so many experts a layer (asked for if needed)."""
        size = self._size(n_tokens)
        if size.other is None:
            size.rest = max(0, size.rest - 1)
            return
        n_L = missed_L()
        size.seen.update(int(n) for n in np.unique(n_L) if n > 0)
        size.times[size.turn % 2].append((seconds, int(n_L.sum())))
        size.turn += 1
        if len(size.times[1]) >= TRIES:
            self._judge(size)

    def _put(self, moved: Moved) -> None:
        if moved != self._applied:
            self._apply(moved)
            self._applied = moved

    def _size(self, n_tokens: int) -> _Size:
        if n_tokens not in self._sizes:
            self._sizes[n_tokens] = _Size(self._start)
        return self._sizes[n_tokens]

    def _next_trial(self, size: _Size) -> None:
        while size.step < len(STEPS):
            if not size.queue:
                size.queue = [s for sign in (1, -1) for s in _neighbour(size.kept, size.step, sign)]
            while size.queue:
                tried = size.queue.pop(0)
                if self._runs(size, tried) not in {self._runs(size, size.kept), *size.refused}:
                    size.other, size.times, size.turn = tried, ([], []), 0
                    return
            size.step += 1
        size.step, size.rest = AGAIN, REST_WINDOWS
        size.refused.clear()

    def _runs(self, size: _Size, speeds: Speeds) -> Moved:
        """What windows would do with it, by what they missed until now."""
        moved = speeds.moved(self._most)
        return tuple(moved[n - 1] for n in sorted(size.seen)) if size.seen else moved

    def _judge(self, size: _Size) -> None:
        assert size.other is not None, "nothing was tried"
        # the first window of a pair pays for what the one before left in the caches
        kept, tried = compared(*(times[1:] for times in size.times))
        other, size.other = size.other, None
        if tried < kept * (1 - MARGIN):
            size.queue = _further(size.kept, other)
            size.kept = other
            size.refused.clear()
        else:
            size.refused.add(self._runs(size, other))
        if not size.queue:
            size.step += 1


def compared(kept: list[Timed], tried: list[Timed]) -> tuple[float, float]:
    """Medians of both, as if all windows had missed as many experts as they did on average: what a
    missed expert costs is the median of all pairs of windows that ran alike."""
    pairs = [pair for times in (kept, tried) for pair in combinations(times, 2)]
    costs = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs if a[1] != b[1]]
    cost = max(0.0, statistics.median(costs)) if costs else 0.0
    mean = statistics.mean(n for times in (kept, tried) for _, n in times)
    first, second = (
        statistics.median(seconds - cost * (n - mean) for seconds, n in times)
        for times in (kept, tried)
    )
    return first, second


def _neighbour(speeds: Speeds, step: int, sign: int) -> list[Speeds]:
    """The neighbour in that direction, if there is one."""
    name, by = STEPS[step]
    return _checked(replace(speeds, **{name: getattr(speeds, name) + sign * by}))


def _further(before: Speeds, now: Speeds) -> list[Speeds]:
    """The next one in the direction from ``before`` to ``now``."""
    parts, lead = 2 * now.parts - before.parts, 2 * now.lead - before.lead
    return _checked(Speeds(parts, lead))


def _checked(speeds: Speeds) -> list[Speeds]:
    fits = 0 <= speeds.parts <= MOST_PARTS and abs(speeds.lead) <= MOST_LEAD
    return [speeds] if fits else []
