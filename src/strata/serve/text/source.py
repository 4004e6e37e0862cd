"""The text of one answer as a parser reads it: taken from the front, waited for where it ends.

Parsers are written as generators: where they need text that has not come yet, they yield, and
``feed`` wakes them. Invariant: what a reading function decides depends on the text alone, never on
where it was cut, because nothing is decided that further text could change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeVar

from strata.serve.text.deltas import CONTROL_CLOSE, CONTROL_OPEN

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A piece of parsing that yields when it needs more text, and returns T."""

_SPACE = " \t\r\n"


class ControlFilter:
    """Takes the marks off control tokens: known ones become what ``kept`` says, others vanish."""

    def __init__(self, kept: Mapping[str, str]) -> None:
        self._kept = kept
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain, marks replaced."""
        if not self._held and CONTROL_OPEN not in text:
            return text
        before, mark, rest = (self._held + text).partition(CONTROL_OPEN)
        parts = [before]
        while mark:
            spelled, closed, after = rest.partition(CONTROL_CLOSE)
            if not closed:
                break
            parts.append(self._kept.get(spelled, ""))
            before, mark, rest = after.partition(CONTROL_OPEN)
            parts.append(before)
        self._held = mark + rest
        return "".join(parts)


class Tags:
    """A set of tags searched together. None of them may begin with another."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.tags = tuple(tags)
        self._pattern = re.compile("|".join(map(re.escape, self.tags))) if self.tags else None
        self._begins = frozenset(tag[:n] for tag in self.tags for n in range(1, len(tag)))
        self._longest = max(map(len, self.tags), default=1) - 1

    def search(self, text: str) -> re.Match[str] | None:
        """The first tag."""
        return self._pattern.search(text) if self._pattern else None

    def undecided(self, text: str) -> int:
        """Length of the end of ``text`` that may be the begin of a tag."""
        for n in range(min(self._longest, len(text)), 0, -1):
            if text[-n:] in self._begins:
                return n
        return 0

    def begin(self, text: str) -> bool:
        """Whether ``text``, maybe empty, may be the begin of a tag (and is none yet)."""
        return not text or text in self._begins


class Source:
    """Text fed so far and not read yet."""

    def __init__(self) -> None:
        self.held = ""
        self.ended = False

    def take(self, n: int) -> str:
        """The first n characters."""
        text, self.held = self.held[:n], self.held[n:]
        return text

    def text_until(self, tags: Tags, emit: Callable[[str], None]) -> Reading[str | None]:
        """Emit text up to a tag and return the tag (taken), or None at the end of the answer."""
        while True:
            found = tags.search(self.held)
            if found:
                emit(self.take(found.start()))
                return self.take(len(found.group()))
            emit(self.take(len(self.held) - (0 if self.ended else tags.undecided(self.held))))
            if self.ended:
                return None
            yield

    def skip_space(self) -> Reading[str]:
        """Take white space up to something else (or the end); returns it."""
        taken = ""
        while True:
            rest = self.held.lstrip(_SPACE)
            taken += self.take(len(self.held) - len(rest))
            if rest or self.ended:
                return taken
            yield

    def next_is(self, tags: Tags) -> Reading[str | None]:
        """The tag that the text begins with (taken), or None (nothing taken)."""
        while True:
            for tag in tags.tags:
                if self.held.startswith(tag):
                    return self.take(len(tag))
            if self.ended or not tags.begin(self.held):
                return None
            yield

    def follows(self, start: int, tags: Tags) -> Reading[bool]:
        """Whether white space and then a tag, or the end of the answer, stands at ``start``.
        Nothing is taken."""
        while True:
            rest = self.held[start:].lstrip(_SPACE)
            if any(rest.startswith(tag) for tag in tags.tags):
                return True
            if self.ended or not tags.begin(rest):
                return self.ended and not rest
            yield

    def word(self, stops: str, limit: int) -> Reading[str | None]:
        """The text before the first of the characters ``stops`` (taken, the stop left), or None
        when none comes within ``limit`` characters (nothing taken)."""
        pattern = re.compile(f"[{re.escape(stops)}]")
        while True:
            found = pattern.search(self.held[: limit + 1])
            if found:
                return self.take(found.start())
            if self.ended or len(self.held) > limit:
                return None
            yield
