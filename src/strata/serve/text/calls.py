"""Tool calls as models write them between tags: JSON (Hermes), Qwen's XML, GLM's pairs, DeepSeek's.

A reader begins behind the tag that opens a call. As soon as the call's name is certain it starts
the call and streams the arguments; before that, what turns out to be no call is given back as
text. A call that the answer's end cuts stays cut: closing it would make a wrong call of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strata.serve.text.answer import Output
from strata.serve.text.argument_types import ArgumentTypes
from strata.serve.text.json_pieces import JsonObject
from strata.serve.text.source import Reading, Source, Tags
from strata.serve.text.specs import ToolSpec

_MAX_NAME = 256
_JSON_TEXT = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})+"'
_NAME_FIRST = re.compile(
    rf'\{{\s*"name"\s*:\s*({_JSON_TEXT})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_XML_NAME = re.compile(r"[^\s<>{}\"'=]+")


class CallReader:
    """Reads calls of one format. ``opens``: the tags that may begin one."""

    opens: Sequence[str] = ()

    def __init__(self, source: Source, out: Output, tools: Sequence[ToolSpec]) -> None:
        self.source = source
        self.out = out
        self.types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}

    def read(self, tag: str, emit: Callable[[str], None]) -> Reading[None]:
        """Read what follows the opening tag; text that is no call goes to ``emit``."""
        raise NotImplementedError

    def _json_arguments(self) -> Reading[bool]:
        """Stream the JSON value that begins here; whether it was complete."""
        value = JsonObject()
        while True:
            piece, self.source.held = value.push(self.source.held)
            self.out.arguments(piece)
            if value.done or self.source.ended:
                return value.done
            yield


class JsonCalls(CallReader):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    opens = ("<tool_call>",)
    _close = Tags(["</tool_call>"])
    _after = Tags(["}", ",", "</tool_call>"])

    def read(self, tag: str, emit: Callable[[str], None]) -> Reading[None]:
        """One call."""
        space = yield from self.source.skip_space()
        if not self.source.held.startswith("{"):
            emit(tag + space)
            return
        yield from self.read_object(tag + space, emit)

    def read_object(self, before: str, emit: Callable[[str], None]) -> Reading[None]:
        """The object, which begins here. before: given back with it when it is no call."""
        whole, raw, mended = JsonObject(), "", ""
        while True:
            header = _NAME_FIRST.match(self.source.held)
            if header:
                yield from self._stream(header)
                return
            fresh = self.source.held[len(raw) :]
            piece, rest = whole.push(fresh)
            raw += fresh[: len(fresh) - len(rest)]
            mended += piece
            if whole.done or self.source.ended:
                self.source.take(len(raw))
                yield from self._whole(mended, before + raw, emit)
                return
            yield

    def _stream(self, header: re.Match[str]) -> Reading[None]:
        """The name came first, as it should: the arguments can go out as they are written."""
        self.source.take(len(header.group()))
        self.out.start(json.loads(header.group(1)))
        complete = yield from self._json_arguments()
        if not complete:
            return
        yield from self.source.skip_space()
        after = yield from self.source.next_is(self._after)
        if after == ",":  # keys behind the arguments mean nothing to us
            outer = JsonObject()
            outer.push("{")
            while not outer.done and not self.source.ended:
                _, self.source.held = outer.push(self.source.held)
                yield from self._wait(outer.done)
        elif after is None or after == "</tool_call>":  # a closing bracket was forgotten
            self.out.tag()
            return
        yield from self._closed()

    def _wait(self, enough: bool) -> Reading[None]:
        if not enough and not self.source.ended:
            yield

    def _whole(self, mended: str, raw: str, emit: Callable[[str], None]) -> Reading[None]:
        """The object came in another order, or is none."""
        call = _call_of(mended)
        if call is None:
            emit(raw)
            return
        self.out.start(call[0])
        self.out.arguments(call[1])
        yield from self._closed()

    def _closed(self) -> Reading[None]:
        yield from self.source.skip_space()
        yield from self.source.next_is(self._close)
        self.out.tag()


def _call_of(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call object, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # the arguments as a text that holds JSON
        return value["name"], arguments
    return value["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)


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
        key = yield from self.source.word(self.pairs.key_close[0], _MAX_NAME)
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
        name = yield from self.source.word("<>\n{", _MAX_NAME)
        if name is None or not _XML_NAME.fullmatch(name) or not self.source.held.startswith(">"):
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
        name = yield from self.source.word("<>\n{ ", _MAX_NAME)
        if name is None or not _XML_NAME.fullmatch(name):
            emit(before + (name or ""))
            return
        body = yield from self.source.follows(0, self._next)
        if not body or self.source.ended and not self.source.held.strip():
            emit(before + name)
            return
        yield from self.read_pairs(name, emit)


class DeepSeekCalls(CallReader):
    """``begin NAME sep {...} end`` (V3.1) or ``begin function sep NAME`` and fenced JSON (V3)."""

    opens = ("<｜tool▁calls▁begin｜>",)
    words = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    )  # fmt: skip
    _more = Tags(["<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"])
    _end = Tags(["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"])
    _sep = Tags(["<｜tool▁sep｜>"])
    _fence = Tags(["```json"])

    def read(self, tag: str, emit: Callable[[str], None]) -> Reading[None]:
        """All calls of the answer."""
        before = tag
        while True:
            before += yield from self.source.skip_space()
            word = yield from self.source.next_is(self._more)
            if word is None or word == "<｜tool▁calls▁end｜>":
                if before.strip():
                    emit(before + (word or ""))
                return
            before += word
            name = yield from self._name(before, emit)
            if name is None:
                return
            self.out.start(name)
            yield from self._arguments()
            before = ""

    def _name(self, before: str, emit: Callable[[str], None]) -> Reading[str | None]:
        """The call's name, up to its arguments; None when it is no call (given back as text)."""
        first = yield from self.source.word("<", _MAX_NAME)
        sep = None if first is None else (yield from self.source.next_is(self._sep))
        if first is None or sep is None:
            emit(before + (first or ""))
            return None
        before += first + sep
        name = first.strip()
        if name == "function":
            before += yield from self.source.skip_space()
            if not self.source.held.startswith("{"):
                second = yield from self.source.word("\n<", _MAX_NAME)
                name = (second or "").strip()
                before += second or ""
        if not _XML_NAME.fullmatch(name):
            emit(before)
            return None
        return name

    def _arguments(self) -> Reading[None]:
        """The JSON, with or without a fence around it, and the tag behind it."""
        yield from self.source.skip_space()
        fence = yield from self.source.next_is(self._fence)
        if fence:
            yield from self.source.skip_space()
        if self.source.held.startswith("{"):
            yield from self._json_arguments()
            yield from self.source.text_until(self._end, _nothing)
        else:
            yield from self.source.text_until(self._end, self.out.arguments)
        self.out.tag()


def _nothing(text: str) -> None:
    """White space and fences between a call's arguments and its end."""


READERS: Mapping[str, type[CallReader]] = {
    "json": JsonCalls,
    "qwen": QwenCalls,
    "glm": GlmCalls,
    "deepseek": DeepSeekCalls,
}
"""Readers by the name of their format."""
