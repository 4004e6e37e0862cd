"""What a session remembers of earlier prompts: the interface, and the plainest memory.

Knows no text and no windows. ``conversations.Conversations`` is the memory that keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.events import Reuse

Logits = npt.NDArray[np.float32]


class Sequenced(Protocol):
    """What the plainest memory needs of an engine."""

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        ...

    def reset(self) -> None:
        """Commit nothing."""
        ...


class Memory(Protocol):
    """Keeps more than the last conversation (see ``conversations.Conversations``)."""

    def arrange(self, prompt: Sequence[int], exact_only: bool = False) -> Reuse:
        """Make the engine hold as much of the prompt as is known; exact_only: in exact state."""
        ...

    def row(self) -> Logits | None:
        """Logits after the last committed token, if they are known."""
        ...

    def set_row(self, row: Logits | None) -> None:
        """These are the logits after the last committed token."""
        ...

    def reading(
        self, prompt: Sequence[int], reuse: Reuse, progress: Callable[[int, int], None] | None
    ) -> Callable[[int, int], None]:
        """Progress callback for reading the rest of the prompt."""
        ...

    def wrote_window(self, exact: bool | None = None) -> None:
        """A window is about to be committed; exact: whether it leaves the state that reading
        would (None: as the engine was loaded)."""
        ...

    def rewind(self) -> bool:
        """Back to a state from before the prompt that was broken off, if there is one."""
        ...

    def reset(self) -> None:
        """A new sequence."""
        ...


class LastOnly:
    """The memory of a session without one: the last conversation, when the prompt continues it."""

    def __init__(self, engine: Sequenced) -> None:
        self._engine = engine
        self._row: Logits | None = None
        self._exact_tokens: int | None = None
        """Tokens before the first window that was not exact."""

    def arrange(self, prompt: Sequence[int], exact_only: bool = False) -> Reuse:
        """A state that goes beyond what both share cannot be cut back, so it is dropped."""
        kept, exact = self._engine.tokens, self._exact_tokens
        same = _common_prefix(kept, prompt)
        whole = same == len(prompt) == len(kept) and self._row is not None
        refused = exact_only and exact is not None
        if refused or same < len(kept) or (same == len(prompt) and not whole):
            self.reset()
            return Reuse(len(prompt), 0, same if same < len(kept) else None)
        return Reuse(len(prompt), same, None, 0 if exact is None else same - exact)

    def row(self) -> Logits | None:
        """Logits after the last committed token."""
        return self._row

    def set_row(self, row: Logits | None) -> None:
        """Keep them."""
        self._row = row

    def reading(
        self, prompt: Sequence[int], reuse: Reuse, progress: Callable[[int, int], None] | None
    ) -> Callable[[int, int], None]:
        """Nothing to do on the way."""
        return progress or (lambda done, total: None)

    def wrote_window(self, exact: bool | None = None) -> None:
        """Note where state begins that an exact request must not reuse."""
        if exact is False and self._exact_tokens is None:
            self._exact_tokens = len(self._engine.tokens)

    def rewind(self) -> bool:
        """There is nothing to go back to."""
        return False

    def reset(self) -> None:
        """A new sequence."""
        self._row = self._exact_tokens = None
        self._engine.reset()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of both."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
