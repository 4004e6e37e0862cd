"""A scripted stand-in for an engine: logits are a function of the committed tokens, nothing else.

It keeps to the protocol strictly, so that a token committed too much or too little changes all that
follows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from strata.engine.window_output import WindowOutput, output_of

V, EOS = 40, 39
PROMPT = [3, 1, 4, 1, 5]


def row_after(tokens: Sequence[int]) -> np.ndarray:
    """Logits [V] that depend on the whole history; the end token never comes by itself."""
    seed = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    row = np.random.default_rng(seed).normal(size=V).astype(np.float32)
    row[EOS] = -50
    return row


def letters_after(text: str) -> Callable[[Sequence[int]], np.ndarray]:
    """A model that writes the given characters after the prompt, then end tokens."""

    def row(tokens: Sequence[int]) -> np.ndarray:
        at = len(tokens) - len(PROMPT)
        out = np.zeros(V, np.float32)
        out[ALPHABET.index(text[at]) if at < len(text) else EOS] = 9
        return out

    return row


ALPHABET = " abcdefghijklmnopqrstuvwxyz"


class ScriptedEngine:
    """Keeps to the protocol strictly: a window is committed once, within its size and the
    context.
    """

    n_vocab = V
    mode = "exact"

    def __init__(
        self, row: Callable[[Sequence[int]], np.ndarray] = row_after, context_tokens: int = 200
    ) -> None:
        self.context_tokens = context_tokens
        self.tokens: list[int] = []
        self.row = row
        self.n_read: list[int] = []
        self.sizes: list[int] = []
        self._window: list[int] | None = None

    def reset(self) -> None:
        self.tokens, self._window = [], None

    def read_prompt(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> np.ndarray:
        assert 0 < len(tokens) <= self.context_tokens - len(self.tokens)
        self.n_read.append(len(tokens))
        self.tokens += tokens
        if progress is not None:
            progress(len(tokens), len(tokens))
        return self.row(self.tokens)

    def verify(self, tokens: Sequence[int]) -> WindowOutput:
        assert self._window is None, "the window before was not committed"
        assert 0 < len(tokens) <= self.context_tokens - len(self.tokens)
        self._window = list(tokens)
        self.sizes.append(len(tokens))
        return output_of(
            [self.row(self.tokens + self._window[: i + 1]) for i in range(len(tokens))]
        )

    def commit(self, n: int) -> None:
        assert self._window is not None and 0 <= n <= len(self._window)
        self.tokens += self._window[:n]
        self._window = None


class Letters:
    """One character a token."""

    def push(self, token: int) -> str:
        return ALPHABET[token] if token < len(ALPHABET) else ""

    def finish(self) -> str:
        return ""
