"""Drafters guess the next tokens; the engine verifies guesses together and keeps those it agrees
with.

A drafter never changes the text, only how many windows it takes. It knows token ids and nothing
else. It is told every token of the conversation exactly once and in order, and may be asked for
guesses at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from strata.core.settings import Settings


class Drafter(Protocol):
    """Proposes tokens that may follow the ones it was told."""

    vocabulary: frozenset[int] | None
    """Tokens it is able to propose; None is all."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget everything; the text so far is ``tokens``."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were added to the text."""
        ...

    def propose(self, n: int) -> list[int]:
        """At most n guesses of what follows, the nearest first; fewer or none when it has no
        idea.
        """
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    vocabulary: frozenset[int] | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to keep."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Nothing to keep."""

    def propose(self, n: int) -> list[int]:
        """None."""
        return []


class LookupDrafter:
    """Prompt lookup: finds the longest earlier copy of the text's end and proposes what followed
    it.

    A copy has at least min_ngram tokens; of copies that agree equally far back (up to max_ngram
    tokens) the latest counts. Where the copy runs into the end of the text, the proposals continue
    its period.
    """

    vocabulary: frozenset[int] | None = None

    def __init__(self, min_ngram: int = 3, max_ngram: int = 16) -> None:
        self._min, self._max = min_ngram, max_ngram
        self._ids = np.empty(256, dtype=np.int64)
        self._n = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Start over with this text."""
        self._n = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        need = self._n + len(tokens)
        if need > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(need, dtype=np.int64)])
        self._ids[self._n : need] = tokens
        self._n = need

    def propose(self, n: int) -> list[int]:
        """What followed the longest earlier copy of the end, n tokens; nothing without a copy."""
        start = self._after_longest_copy(self._ids[: self._n])
        if start is None:
            return []
        text: list[int] = self._ids[start : self._n].tolist()
        for i in range(n):
            text.append(text[i])
        return text[:n]

    def _after_longest_copy(self, ids: npt.NDArray[np.int64]) -> int | None:
        """Position after the best earlier copy of the end of ids."""
        n, shortest = len(ids), self._min
        if n <= shortest:
            return None
        found = np.ones(n - shortest, dtype=bool)  # found[i]: a copy of the last tokens starts at i
        for back in range(shortest):
            found &= ids[back : back + n - shortest] == ids[n - shortest + back]
        ends = np.flatnonzero(found) + shortest
        for length in range(shortest + 1, min(self._max, n - 1) + 1):
            # ends >= length holds or the index wraps to a token after the copy: leave those out
            longer = ends[(ends >= length) & (ids[ends - length] == ids[n - length])]
            if len(longer) == 0:
                break
            ends = longer
        return int(ends[-1]) if len(ends) else None


class ScriptedDrafter:
    """Proposes from a fixed text by position, so that a test decides which guesses are right.

    sizes: how many guesses to offer in successive windows, repeated from the start; None offers all
    that are asked.
    """

    def __init__(
        self,
        text: Sequence[int],
        sizes: Sequence[int] | None = None,
        vocabulary: frozenset[int] | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._text = list(text)
        self._sizes = sizes
        self._n_tokens = 0
        self._n_windows = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Only the length counts."""
        self._n_tokens = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Only the length counts."""
        self._n_tokens += len(tokens)

    def propose(self, n: int) -> list[int]:
        """The scripted tokens at the next positions, up to the first outside the vocabulary."""
        if self._sizes is not None:
            n = min(n, self._sizes[self._n_windows % len(self._sizes)])
        self._n_windows += 1
        guesses: list[int] = []
        for token in self._text[self._n_tokens : self._n_tokens + n]:
            if self.vocabulary is not None and token not in self.vocabulary:
                break
            guesses.append(token)
        return guesses


DRAFTERS: Mapping[str, Callable[[], Drafter]] = {"none": NoDrafter, "lookup": LookupDrafter}
"""Drafters by the name that --draft gives them."""


def build_drafter(settings: Settings) -> Drafter:
    """The drafter of resolved settings."""
    return DRAFTERS[settings.draft]()
