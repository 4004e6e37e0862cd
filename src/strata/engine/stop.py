"""Stop texts: holds text back while it may be the beginning of one. Knows no tokens.

What comes out does not depend on how the text was cut into pieces: the stop text that is complete
first ends it, and of those that are complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Push pieces of text; take out what is certain."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.found: str | None = None
        """The stop text that ended the text, once one did."""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that is certain now, whether a stop text was found). After a find nothing more is
        certain: the text ends before it."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = self._first_complete(text)
        if found is not None:
            self._held = ""
            return text[:found], True
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back, when the text ends without a stop text."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> int | None:
        """Start of the stop text that ends first; of those the one that begins first."""
        ends = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if not ends:
            return None
        end, start = min(ends)
        self.found = text[start:end]
        return start

    def _undecided(self, text: str) -> int:
        """Length of the longest end of text that begins a stop text."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
