"""Finds the end of a JSON value in text that arrives in pieces, looking at strings and brackets.

No validator: what is between the brackets is handed on as it was written, except that line breaks
and other control characters inside strings, which JSON forbids and models write, become escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(r'[\[\]{}"]')
_IN_STRING = re.compile(r'[\\"\x00-\x1f]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_STEP = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{},]', re.S)
_CUT = re.compile(
    r'\s*,?\s*(?:"(?:[^"\\]|\\.)*(?:"\s*:?\s*|\\?))?'
    r'(?:"(?:[^"\\]|\\.)*\\?|-?[\d.eE+-]*|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?)',
    re.S,
)
"""A member or element that is not complete."""


class JsonObject:
    """Push text that begins with ``{`` or ``[``; ``done`` when its bracket has closed."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string = False
        self._escape = False

    def push(self, text: str) -> tuple[str, str]:
        """(what belongs to the value, mended; the rest behind it)."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done:
            if self._escape:
                self._escape = False
                out.append(_escaped(text[at]))
                at += 1
                continue
            found = (_IN_STRING if self._string else _TOKEN).search(text, at)
            if found is None:
                out.append(text[at:])
                return "".join(out), ""
            char = found.group()
            out.append(text[at : found.start()])
            out.append(_escaped(char))
            at = found.end()
            self._see(char)
        return "".join(out), text[at:]

    def _see(self, char: str) -> None:
        if char == "\\":
            self._escape = True
        elif char == '"':
            self._string = not self._string
        elif self._string:
            return
        elif char in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth == 0


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if _CONTROL.match(char) else char


def is_whole(text: str) -> bool:
    """Whether the text is JSON to its end."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def cut_object(text: str) -> dict[str, Any] | None:
    """The object that JSON text holds, without the member or element that the text's end cut in
    two (``{"a": 1, "b": "x`` is ``{"a": 1}``); None when it is no begin of an object."""
    open_brackets: list[str] = []
    whole, closers = 0, ""
    for step in _STEP.finditer(text):
        char = step.group()
        if char in "{[":
            open_brackets.append("}" if char == "{" else "]")
        elif char in "}]" and not (open_brackets and open_brackets.pop() == char):
            return None
        if char in "{[,":
            whole = step.start() if char == "," else step.end()
            closers = "".join(reversed(open_brackets))
    candidates = [text + "".join(reversed(open_brackets))]
    if _CUT.fullmatch(text, whole):
        candidates.append(text[:whole] + closers)
    for candidate in candidates:
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None
