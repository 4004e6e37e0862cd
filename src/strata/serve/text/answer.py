"""What all parsers of answers share: the feed loop, the deltas, and white space around tags.

White space that touches a tag belongs to the format, not to the text, so it is held back until
text follows. Knows no format.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from strata.serve.text.deltas import (
    ContentText,
    Delta,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from strata.serve.text.source import ControlFilter, Reading, Source

_SPACE = " \t\r\n"


def new_call_id() -> str:
    """A fresh id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


class Output:
    """Collects deltas; neighbouring texts of one kind become one."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self.deltas: list[Delta] = []
        self.n_calls = 0
        self._call_id = call_id
        self._space = ""
        self._at_tag = False

    def text(self, text: str, reasoning: bool) -> None:
        """Thinking or content. Line breaks behind a tag and white space before one are left out."""
        if self._at_tag:
            text = text.lstrip("\r\n")
        shown = text.rstrip(_SPACE)
        if shown:
            self._add(self._space + shown, reasoning)
            self._space = ""
            self._at_tag = False
        self._space += text[len(shown) :]

    def tag(self) -> None:
        """The format's own words stand here."""
        self._space = ""
        self._at_tag = True

    def end(self, reasoning: bool) -> None:
        """The answer ends: white space at its end is part of it, unless a tag was last."""
        if self._space and not self._at_tag:
            self._add(self._space, reasoning)
        self._space = ""

    def start(self, name: str) -> int:
        """A call begins; its index."""
        self.tag()
        index = self.n_calls
        self.n_calls += 1
        self.deltas.append(ToolCallStart(index, self._call_id(), name))
        return index

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self.deltas.append(ToolCallArguments(self.n_calls - 1, text))

    def _add(self, text: str, reasoning: bool) -> None:
        kind = ReasoningText if reasoning else ContentText
        last = self.deltas[-1] if self.deltas else None
        if isinstance(last, kind):
            self.deltas[-1] = kind(last.text + text)
        else:
            self.deltas.append(kind(text))


class ReadingParser:
    """A parser written as a reading (see ``source``); subclasses give ``read``."""

    def __init__(self, kept: Mapping[str, str], call_id: Callable[[], str] | None = None) -> None:
        self.source = Source()
        self.out = Output(call_id or new_call_id)
        self._filter = ControlFilter(kept)
        self._thinking = False
        self._run = self.read()
        next(self._run, None)

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside thinking."""
        return self._thinking

    def feed(self, text: str) -> list[Delta]:
        """What became certain."""
        text = self._filter.push(text)
        if text:
            self.source.held += text
            next(self._run, None)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest."""
        self.source.ended = True
        for _ in self._run:
            raise AssertionError("a reading must not wait for more than there is")
        self.out.end(self._thinking)
        return self._take()

    def read(self) -> Reading[None]:
        """Read the whole answer; must not return before the source has ended."""
        raise NotImplementedError

    def emit(self, text: str) -> None:
        """Text outside calls."""
        if text:
            self.out.text(text, self._thinking)

    def _take(self) -> list[Delta]:
        deltas, self.out.deltas = self.out.deltas, []
        return deltas
