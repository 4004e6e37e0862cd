"""Tool calls whose arguments are pairs of key and value between tags: Qwen's XML, GLM's pairs.

The values are text; the tool's schema says what JSON they are. See ``calls`` for the rules that
all readers keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.serve.text.answer import Output
from strata.serve.text.argument_types import ArgumentTypes
from strata.serve.text.calls import MAX_NAME, NAME, CallReader, JsonCalls
from strata.serve.text.source import Reading, Source, Tags
from strata.serve.text.specs import ToolSpec


@dataclass(frozen=True)
class PairTags:
    """How a format of keys and values writes them: key_open KEY key_close value VALUE value_close.

    value: what stands between key and value (white space around it does not count).
    line_breaks: whether one line break on each side of a value belongs to the format.
    ends: what closes the call.
    """

    key_open: str
    key_close: str
    value: str
    value_close: str
    line_breaks: bool
    ends: tuple[str, ...]


QWEN_PAIRS = PairTags("<parameter=", ">", "", "</parameter>", True, ("</function>", "</tool_call>"))
GLM_PAIRS = PairTags(
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", False, ("</tool_call>",)
)


class PairCalls(CallReader):
    """Arguments as pairs between tags; the values become JSON by the tool's schema."""

    pairs: PairTags

    def __init__(self, source: Source, out: Output, tools: Sequence[ToolSpec]) -> None:
        super().__init__(source, out, tools)
        self._next = Tags([self.pairs.key_open, *self.pairs.ends])
        self._value_close = Tags([self.pairs.value_close])
        self._value_open = Tags([self.pairs.value] if self.pairs.value else [])
        self._key_close = Tags([self.pairs.key_close])

    def read_pairs(self, name: str, emit: Callable[[str], None]) -> Reading[None]:
        """Start the call and read its pairs up to an end, or to text that has no place there."""
        self.out.start(name)
        types = self.types.get(name) or ArgumentTypes({})
        before = "{"
        while True:
            yield from self.source.skip_space()
            tag = yield from self.source.next_is(self._next)
            if tag is None:
                if not self.source.ended:
                    self.out.arguments("{}" if before == "{" else "}")
                return
            if tag != self.pairs.key_open:
                self.out.arguments("{}" if before == "{" else "}")
                yield from self._closed(tag)
                return
            key = yield from self._key()
            if key is None:
                if not self.source.ended:
                    self.out.arguments("{}" if before == "{" else "}")
                    emit(tag)
                return
            self.out.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            complete = yield from self._value(key, types)
            if not complete:
                return

    def _closed(self, tag: str) -> Reading[None]:
        """Behind the tag that ended the call."""
        self.out.tag()
        yield from ()

    def _key(self) -> Reading[str | None]:
        """The key, up to its value; None (nothing taken) when it is none."""
        key = yield from self.source.word(self.pairs.key_close[0], MAX_NAME)
        if key is None:
            return None
        closed = yield from self.source.next_is(self._key_close)
        if closed is None:
            self.source.held = key + self.source.held
            return None
        if self.pairs.value:
            yield from self.source.skip_space()
            yield from self.source.next_is(self._value_open)
        return key.strip()

    def _value(self, key: str, types: ArgumentTypes) -> Reading[bool]:
        """One value, up to a closing tag that something of the format follows: a value may quote
        its own tags. Whether it was complete."""
        value = _Value(self.out, None if types.is_text(key) else [], self.pairs.line_breaks)
        while True:
            closed = yield from self.source.text_until(self._value_close, value.push)
            if closed is None:
                return False
            ends = yield from self.source.follows(0, self._next)
            if ends:
                value.end(key, types)
                return True
            value.push(closed)


class _Value:
    """A value as it comes: a string goes out at once, anything else (``held``) at its end."""

    def __init__(self, out: Output, held: list[str] | None, line_breaks: bool) -> None:
        self._out = out
        self._held = held
        self._break = line_breaks
        self._first = True
        self._tail = ""
        if held is None:
            out.arguments('"')

    def push(self, text: str) -> None:
        """A piece."""
        if self._break and self._first and text:
            text = text.removeprefix("\n")
            self._first = False
        if self._held is not None:
            self._held.append(text)
            return
        text = self._tail + text
        cut = len(text) - (self._break and text.endswith("\n"))
        self._tail = text[cut:]
        self._out.arguments(json.dumps(text[:cut], ensure_ascii=False)[1:-1])

    def end(self, key: str, types: ArgumentTypes) -> None:
        """The value is complete."""
        if self._held is None:
            self._out.arguments('"')
            return
        text = "".join(self._held)
        if self._break:
            text = text.removesuffix("\n")
        self._out.arguments(types.as_json(key, text))


class QwenCalls(PairCalls):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, also
    without the outer tag, and JSON where a model falls back to it."""

    pairs = QWEN_PAIRS
    opens = ("<tool_call>", "<function=")
    _function = Tags(["<function="])
    _outer = Tags(["</tool_call>"])

    def __init__(self, source: Source, out: Output, tools: Sequence[ToolSpec]) -> None:
        super().__init__(source, out, tools)
        self._json = JsonCalls(source, out, tools)
        self._body = Tags([self.pairs.key_open, *self.pairs.ends, "{"])

    def read(self, tag: str, emit: Callable[[str], None]) -> Reading[None]:
        """One call."""
        before = tag
        if tag != "<function=":
            before += yield from self.source.skip_space()
            if self.source.held.startswith("{"):
                yield from self._json.read_object(before, emit)
                return
            function = yield from self.source.next_is(self._function)
            if function is None:
                emit(before)
                return
            before += function
        name = yield from self.source.word("<>\n{", MAX_NAME)
        if name is None or not NAME.fullmatch(name) or not self.source.held.startswith(">"):
            emit(before + (name or ""))
            return
        before += name + self.source.take(1)
        if (
            not (yield from self.source.follows(0, self._body))
            or self.source.ended
            and not (self.source.held.strip())
        ):
            emit(before)
            return
        yield from self.source.skip_space()
        if self.source.held.startswith("{"):
            self.out.start(name)
            yield from self._json_arguments()
            yield from self.source.skip_space()
            if (end := (yield from self.source.next_is(self._next))) is not None:
                yield from self._closed(end)
            return
        yield from self.read_pairs(name, emit)

    def _closed(self, tag: str) -> Reading[None]:
        if tag == "</function>":
            yield from self.source.skip_space()
            yield from self.source.next_is(self._outer)
        self.out.tag()


class GlmCalls(PairCalls):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

    pairs = GLM_PAIRS
    opens = ("<tool_call>",)

    def read(self, tag: str, emit: Callable[[str], None]) -> Reading[None]:
        """One call."""
        before = tag + (yield from self.source.skip_space())
        name = yield from self.source.word("<>\n{ ", MAX_NAME)
        if name is None or not NAME.fullmatch(name):
            emit(before + (name or ""))
            return
        body = yield from self.source.follows(0, self._next)
        if not body or self.source.ended and not self.source.held.strip():
            emit(before + name)
            return
        yield from self.read_pairs(name, emit)
