"""The pieces an answer comes in, and the object that finds them. Knows no protocol of clients.

The text that is fed is the answer as the engine decodes it: whole characters, end token left out,
control tokens spelled between ``CONTROL_OPEN`` and ``CONTROL_CLOSE`` (so that a tag that is one
token is told from a text that merely spells it). Text can be cut anywhere, also inside a mark;
a parser's deltas, joined by kind and index, do not depend on the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CONTROL_OPEN = "\ufdd0"
"""Stands before the spelling of a control token; ordinary text never holds it."""
CONTROL_CLOSE = "\ufdd1"
"""Stands behind the spelling of a control token; ordinary text never holds it."""


@dataclass(frozen=True)
class ReasoningText:
    """A piece of thinking; never empty."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """A piece of the answer proper; never empty."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. index counts calls from 0; id is unique in the answer and stays."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments; joined they are one JSON object when the model wrote one."""

    index: int
    text: str


Delta = ReasoningText | ContentText | ToolCallStart | ToolCallArguments


class AnswerParser(Protocol):
    """Splits one answer. Never raises for what a model wrote: what is no call stays content."""

    @property
    def reasoning(self) -> bool:
        """Whether the text fed so far ends inside thinking (for counting reasoning tokens)."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """What became certain with this text; possibly nothing."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the answer (also when it was cut)."""
        ...
