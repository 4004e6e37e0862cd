"""The channels of gpt-oss: analysis is thinking, final is content, a recipient makes it a call.

``<|channel|>NAME[ to=RECIPIENT][<|constrain|>TYPE]<|message|>TEXT<|end|><|start|>assistant...``
Only control tokens structure an answer; text that spells them is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.serve.text.answer import ReadingParser
from strata.serve.text.deltas import CONTROL_CLOSE, CONTROL_OPEN
from strata.serve.text.source import Reading, Tags
from strata.serve.text.specs import ToolSpec


def _control(name: str) -> str:
    return f"{CONTROL_OPEN}<|{name}|>{CONTROL_CLOSE}"


_NAMES = ("start", "end", "return", "call", "channel", "constrain", "message")
START, END, RETURN, CALL, CHANNEL, CONSTRAIN, MESSAGE = map(_control, _NAMES)
_ANY = Tags([START, END, RETURN, CALL, CHANNEL, CONSTRAIN, MESSAGE])
_HEADER = Tags([START, END, RETURN, CALL, CHANNEL, CONSTRAIN, MESSAGE, "to="])
_BODY_ENDS = Tags([START, END, RETURN, CALL, CHANNEL])
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_PREFILLED = re.compile(r"<\|start\|>assistant(?:(?!<\|start\|>|<\|end\|>).)*<\|message\|>\Z", re.S)
_MAX_HEADER = 400


@dataclass(frozen=True)
class _Message:
    """What a header says. recipient: None for text to the user."""

    channel: str
    recipient: str | None


class HarmonyParser(ReadingParser):
    """Splits an answer by its channels. tools: calls are found only when there are any."""

    def __init__(
        self,
        tools: Sequence[ToolSpec],
        *,
        reasoning: bool,
        prompt_tail: str,
        call_id: Callable[[], str] | None = None,
    ) -> None:
        self._calls = bool(tools)
        self._splits = reasoning
        begun = _PREFILLED.search(prompt_tail)
        self._begun = _message_of(begun.group()) if begun else None
        super().__init__({f"<|{name}|>": _control(name) for name in _NAMES}, call_id)

    def read(self) -> Reading[None]:
        """Messages, one after another."""
        message = self._begun
        tag: str | None = None
        while True:
            if message is None:
                message = yield from self._header(tag)
                if message is None:
                    return
            tag = yield from self._body(message)
            self.out.tag()
            self._thinking = False
            message = None
            if tag is None:
                return

    def _header(self, tag: str | None) -> Reading[_Message | None]:
        """The next header (``tag`` of it was read already); text without one is for the user."""
        words: list[str] = []
        if tag not in (START, CHANNEL):
            yield from self.source.skip_space()
            tag = yield from self.source.next_is(_HEADER)
            if tag is None:
                return (
                    None if self.source.ended and not self.source.held else _Message("final", None)
                )
        while tag != MESSAGE:
            words.append(tag)
            tag = yield from self.source.text_until(_ANY, words.append)
            if tag is None or sum(map(len, words)) > _MAX_HEADER:
                text = "".join(w for w in words if CONTROL_OPEN not in w)
                known = text.removeprefix("assistant").strip()
                self.emit("" if known in _CHANNELS or known.startswith("to=") else text)
                return None if tag is None else _Message("final", None)
        return _message_of("".join(words))

    def _body(self, message: _Message) -> Reading[str | None]:
        """A message's text; the tag that ended it."""
        if message.recipient is None or not self._calls:
            self._thinking = self._splits and message.channel == "analysis"
            return (yield from self.source.text_until(_BODY_ENDS, self.emit))
        self.out.start(message.recipient)
        wrote: list[bool] = []

        def arguments(text: str) -> None:
            self.out.arguments(text)
            wrote.append(bool(text.strip()))

        tag = yield from self.source.text_until(_BODY_ENDS, arguments)
        if not any(wrote) and tag is not None:
            self.out.arguments("{}")
        return tag


_CHANNELS = frozenset({"", "analysis", "commentary", "final"})


def _message_of(header: str) -> _Message:
    plain = header.replace(CONTROL_OPEN, "").replace(CONTROL_CLOSE, "")
    recipient = _RECIPIENT.search(plain)
    channel = re.search(r"<\|channel\|>\s*(\w+)", plain)
    name = recipient.group(1).removeprefix("functions.") if recipient else None
    if name in ("user", "all", "assistant"):
        name = None
    return _Message(channel.group(1) if channel else "final", name)
