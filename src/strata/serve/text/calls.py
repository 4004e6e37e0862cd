"""Tool calls whose arguments are JSON: between tags (Hermes), and DeepSeek's.

A reader begins behind the tag that opens a call. As soon as the call's name is certain it starts
the call and streams the arguments; before that, what turns out to be no call is given back as
text. A call that the answer's end cuts stays cut: closing it would make a wrong call of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from strata.serve.text.answer import Output
from strata.serve.text.argument_types import ArgumentTypes
from strata.serve.text.json_pieces import JsonObject
from strata.serve.text.source import Reading, Source, Tags
from strata.serve.text.specs import ToolSpec

MAX_NAME = 256
"""Characters of a name; what is longer is no name."""
_JSON_TEXT = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})+"'
_NAME_FIRST = re.compile(
    rf'\{{\s*"name"\s*:\s*({_JSON_TEXT})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
NAME = re.compile(r"[^\s<>{}\"'=]+")


class CallReader:
    """Reads calls of one format. ``opens``: the tags that may begin one."""

    opens: Sequence[str] = ()

    def __init__(self, source: Source, out: Output, tools: Sequence[ToolSpec]) -> None:
        self.source = source
        self.out = out
        self.types = {tool.name: ArgumentTypes(tool.parameters, tool.strict) for tool in tools}

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
        first = yield from self.source.word("<", MAX_NAME)
        sep = None if first is None else (yield from self.source.next_is(self._sep))
        if first is None or sep is None:
            emit(before + (first or ""))
            return None
        before += first + sep
        name = first.strip()
        if name == "function":
            before += yield from self.source.skip_space()
            if not self.source.held.startswith("{"):
                second = yield from self.source.word("\n<", MAX_NAME)
                name = (second or "").strip()
                before += second or ""
        if not NAME.fullmatch(name):
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
