"""How much a chat template may do: a budget of work and time, and prices known before the work.

Whatever can grow by a number or by doubling is priced before it is made. Knows no templates.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from strata.core.errors import TemplateError
from strata.formats.marked_text import MAX_ITEMS, measure

MAX_CHARS = 1 << 24
"""Longest text a template may make; a prompt of a million tokens has about 5 million characters."""
DEADLINE_S = 10.0
"""Longest time of one rendering."""

_MAX_WORK = 1 << 28
_STEP_WORK = 32
_ITEM_WORK = 8
_MAX_COMPARED = 1000
_MAX_WIDTH = 1000
_MAX_BITS = 4096
# Widths and precisions of four digits or given as arguments; for str.format, fields within fields.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d{0,3}\.)?(\d{4}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*(:[^{}]*\d{4}|\{)")


class Budget:
    """What one rendering may still spend: work (about the characters made) and time."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._left = _MAX_WORK
        self._until = time.monotonic() + deadline_s

    def spend(self, work: int = _STEP_WORK) -> None:
        """TemplateError when work or time is used up."""
        self._left -= work
        if self._left < 0 or time.monotonic() > self._until:
            raise TemplateError("the chat template does too much work; it loops or is hostile")

    def text(self, n_chars: int) -> None:
        """Pays for text; TemplateError when it is too long."""
        if n_chars > MAX_CHARS:
            raise TemplateError(
                f"the chat template makes a text of {n_chars:,} characters; "
                f"the limit is {MAX_CHARS:,}"
            )
        self.spend(_STEP_WORK + n_chars)

    def items(self, count: int) -> None:
        """Pays for a list; TemplateError when it is too long."""
        if count > MAX_ITEMS:
            raise TemplateError(
                f"the chat template makes a list of {count:,} items; the limit is {MAX_ITEMS:,}"
            )
        self.spend(_STEP_WORK + _ITEM_WORK * count)

    def made(self, value: Any) -> None:
        """Pays for a value just made."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.items(len(value))

    def walk(self, value: Any) -> None:
        """Pays for going through all that ``value`` holds, or printing it."""
        size = measure(value)
        self.items(size.items)
        self.text(size.chars)

    def compare(self, value: Any) -> None:
        """Pays for comparing ``value`` with something."""
        if isinstance(value, (list, tuple, dict)) and measure(value).items > _MAX_COMPARED:
            raise TemplateError("the chat template compares lists that are too large")
        self.spend()

    def operator(self, name: str, left: Any, right: Any) -> None:
        """Pays for ``left + right``, ``left * right`` or ``left ** right``."""
        self.spend()
        if name == "+":
            if isinstance(left, str) and isinstance(right, str):
                self.text(len(left) + len(right))
            elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                self.items(len(left) + len(right))
        elif name == "*":
            self._product(left, right)
            self._product(right, left)
        elif name == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))

    def _product(self, value: Any, count: Any) -> None:
        if not isinstance(count, int):
            return
        if isinstance(value, str):
            self.text(len(value) * max(count, 0))
        elif isinstance(value, (list, tuple)):
            self.items(len(value) * max(count, 0))
        elif isinstance(value, int):
            _check_bits(value.bit_length() + count.bit_length())

    def replacing(self, text: str, old: str, new: str) -> None:
        """Pays for ``text.replace(old, new)``."""
        self.text(len(text) + text.count(old) * max(len(new) - len(old), 0))

    def joining(self, between: str, texts: Iterable[str]) -> None:
        """Pays for ``between.join(texts)``."""
        self.text(sum(len(between) + len(text) for text in texts))


def check_numbers(values: Iterable[Any]) -> None:
    """For filters and methods that grow text by a number: TemplateError when one is large."""
    if any(isinstance(value, (int, float)) and abs(value) > _MAX_WIDTH for value in values):
        raise TemplateError(f"the chat template asks for a width over {_MAX_WIDTH}")


def check_percent(template: str) -> None:
    """For ``template % values``: TemplateError for fields that can grow without bound."""
    _check_fields(_WIDE_PERCENT, template)


def check_format(template: str) -> None:
    """The same for ``template.format(...)``."""
    _check_fields(_WIDE_FORMAT, template.replace("{{", "").replace("}}", ""))


def _check_fields(wide: re.Pattern[str], template: str) -> None:
    if wide.search(template):
        raise TemplateError("the chat template formats with a width that is large or not constant")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateError("the chat template works with numbers that are too large")
