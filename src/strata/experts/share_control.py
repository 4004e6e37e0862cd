"""How large the PCIe share is: found by trying, while windows run.

Which experts the GPU reads over the link changes no bit of the output, so the share may follow the
machine: its load, and how many experts are missed. Two shares are run in turns; the one whose
windows are quicker in the middle is kept, then its neighbours are tried. A share that is not
clearly quicker is never kept. Knows no windows: it is told how long they took.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_PARTS = 256
"""The share is a number of 256ths."""
TRIES = 10
"""Windows of each share before they are compared."""
MARGIN = 0.01
"""Part of its time by which a window must be quicker."""
FIRST_STEP, LAST_STEP = 48, 8
REST_WINDOWS = 400
"""Windows without trying once no neighbour is quicker."""


@dataclass
class _Size:
    """What is known for windows of one size."""

    share: int
    step: int = FIRST_STEP
    other: int | None = None
    queue: list[int] = field(default_factory=list)
    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    turn: int = 0
    rest: int = 0


class ShareControl:
    """The share in 256ths for each window size. start: the first one tried.

    apply: puts a share where the plan reads it; called only when it changes.
    """

    def __init__(self, start: int, apply: Callable[[int], None]) -> None:
        self._start, self._apply = start, apply
        self._first = start
        self._sizes: dict[int, _Size] = {}
        self._applied = -1

    def share(self, n_tokens: int) -> int:
        """The share kept for that size."""
        return self._size(n_tokens).share

    def resting(self, n_tokens: int) -> bool:
        """Whether no other share is being tried for that size."""
        size = self._size(n_tokens)
        return size.other is None and size.rest > 0

    def restart(self) -> None:
        """Conditions are others now: find the shares anew, from the smallest size's."""
        if self._sizes:
            self._start = self._sizes[min(self._sizes)].share
        self._sizes.clear()

    def before(self, n_tokens: int) -> None:
        """A window is about to run."""
        size = self._size(n_tokens)
        if size.other is None and size.rest == 0:
            self._next_trial(size)
        chosen = size.share
        if size.other is not None and size.turn % 2:
            chosen = size.other
        if chosen != self._applied:
            self._apply(chosen)
            self._applied = chosen

    def rest(self) -> None:
        """A window is about to run that must have the first share, and is not to be judged by."""
        if self._applied != self._first:
            self._apply(self._first)
            self._applied = self._first

    def after(self, n_tokens: int, seconds: float) -> None:
        """The window took so long."""
        size = self._size(n_tokens)
        if size.other is None:
            size.rest = max(0, size.rest - 1)
            return
        size.times[size.turn % 2].append(seconds)
        size.turn += 1
        if len(size.times[1]) >= TRIES:
            self._judge(size)

    def _size(self, n_tokens: int) -> _Size:
        if n_tokens not in self._sizes:
            self._sizes[n_tokens] = _Size(self._start)
        return self._sizes[n_tokens]

    def _next_trial(self, size: _Size) -> None:
        if not size.queue:
            near = (size.share + size.step, size.share - size.step)
            size.queue = [s for s in near if 0 <= s <= MOST_PARTS]
        size.other = size.queue.pop(0)
        size.times, size.turn = ([], []), 0

    def _judge(self, size: _Size) -> None:
        # the first window of a share pays for what the one before left in the caches
        kept, tried = (statistics.median(times[1:]) for times in size.times)
        if tried < kept * (1 - MARGIN):
            ahead = size.other - size.share if size.other is not None else 0
            size.share += ahead
            onward = size.share + ahead
            size.queue = [onward] if 0 <= onward <= MOST_PARTS else []
        elif not size.queue:
            if size.step > LAST_STEP:
                size.step //= 2
            else:
                size.rest = REST_WINDOWS
        size.other = None
