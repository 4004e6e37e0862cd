"""Tokens that are matched as text before any cutting and merging: control and user-defined ones.

The tokenizers library can match them too, but not "this occurrence yes, that one no", which is what
keeps a user's ``<|im_end|>`` from ending a turn. So they are found here and the library only ever
sees the text between them. Matches are leftmost, then longest, like the library's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

MayMatch = Callable[["AddedToken", int, int], bool]
"""Whether this token may stand for characters [start, end) of the text."""


@dataclass(frozen=True)
class AddedToken:
    """A token found by its spelling.

    control: written by templates and models only (begin, end, roles); never by ordinary text.
    strips_left, strips_right: swallows white space on that side. whole_word: not inside a word.
    """

    id: int
    text: str
    control: bool
    strips_left: bool = False
    strips_right: bool = False
    whole_word: bool = False


class AddedTokens:
    """All added tokens of a vocabulary, searched together."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        every = self._by_text.values()
        self._shorter = {token.text: self._prefixes(token) for token in every}
        self._all = _any_of(every)
        self._ordinary = _any_of(token for token in every if not token.control)

    def _prefixes(self, token: AddedToken) -> list[AddedToken]:
        """Other tokens that ``token`` begins with, longest first."""
        cuts = (token.text[:n] for n in range(len(token.text) - 1, 0, -1))
        return [self._by_text[cut] for cut in cuts if cut in self._by_text]

    def __iter__(self) -> Iterator[AddedToken]:
        return iter(self._by_text.values())

    def split(
        self, text: str, *, control: bool, may_match: MayMatch | None = None
    ) -> Iterator[str | AddedToken]:
        """The text in order, as tokens and the (non-empty) text between them.

        control: control tokens count too. may_match: refuses single occurrences; a shorter token at
        the same place is tried then.
        """
        pattern = self._all if control else self._ordinary
        done = position = 0
        while pattern is not None and (match := pattern.search(text, position)):
            found = self._by_text[match.group()]
            start = match.start()
            for token in (found, *self._shorter[found.text]):
                end = start + len(token.text)
                if (control or not token.control) and _stands(token, text, start, may_match):
                    break
            else:
                position = start + 1
                continue
            before = text[done:start]
            if token.strips_left:
                before = before.rstrip()
            if before:
                yield before
            yield token
            if token.strips_right:
                end = len(text) - len(text[end:].lstrip())
            done = position = end
        if done < len(text):
            yield text[done:]


def _any_of(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    texts = sorted((token.text for token in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _stands(token: AddedToken, text: str, start: int, may_match: MayMatch | None) -> bool:
    end = start + len(token.text)
    around = text[max(start - 1, 0) : start] + text[end : end + 1]
    if token.whole_word and any(char == "_" or char.isalnum() for char in around):
        return False
    return may_match is None or may_match(token, start, end)
