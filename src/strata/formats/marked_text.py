"""Text that remembers which of its characters came from outside the chat template.

A rendered prompt mixes what the template wrote with what users, tools and the assistant said, and
only the template may write control tokens. ``MarkedText`` is a ``str`` that carries the outside
characters as spans through what templates do to strings: slicing, stripping, splitting, replacing,
joining, changing case. Tests (``in``, ``==``, length) see the plain text. Where spans cannot be
followed the whole result counts as outside: an unknown operation can cost a control token its
meaning, never forge one. Knows no template language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple, SupportsIndex

Spans = tuple[tuple[int, int, int], ...]
"""(start, end, level) of outside characters: in order, not overlapping, never empty."""

ASSISTANT = 1
"""Level of what the assistant said in former turns."""
OUTSIDE = 2
"""Level of everything else from outside: users, tools, variables."""

MAX_ITEMS = 400_000
"""Most items a value may hold, nested ones counted each time they occur."""

_FENCES = ("\ufdd0", "\ufdd1")  # noncharacters: never in text meant to be read


class MarkedText(str):
    """A string whose characters inside ``spans`` came from outside."""

    __slots__ = ("spans",)
    spans: Spans

    def __new__(cls, text: str, spans: Spans | None = None) -> MarkedText:
        """``text`` with these spans; without any: all of it from outside."""
        made = super().__new__(cls, text)
        made.spans = _whole(len(made), OUTSIDE) if spans is None else spans
        return made

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> MarkedText:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            start = key.__index__() % len(self)
            return MarkedText(text, _cut(self.spans, start, start + 1))
        start, stop, step = key.indices(len(self))
        if step == 1:
            return MarkedText(text, _cut(self.spans, start, stop))
        levels = [0] * len(self)
        for begin, end, level in self.spans:
            levels[begin:end] = [level] * (end - begin)
        return MarkedText(text, _runs(levels[key]))

    def __add__(self, other: str) -> MarkedText:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> MarkedText:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> MarkedText:
        return concat([self] * count.__index__())

    __rmul__ = __mul__

    def lstrip(self, chars: str | None = None, /) -> MarkedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> MarkedText:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> MarkedText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> MarkedText:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> MarkedText:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def _pieces(self, plain: list[str], sep: str | None) -> list[str]:
        found: list[str] = []
        start = 0
        for piece in plain:
            if sep is None:  # only white space lies between, so the next match is the piece
                start = self.find(piece, start)
            found.append(self[start : start + len(piece)])
            start += len(piece) + len(sep or "")
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        found: list[str] = []
        start = 0
        for whole, line in zip(
            str.splitlines(self, True), str.splitlines(self, keepends), strict=True
        ):
            found.append(self[start : start + len(line)])
            start += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(*str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(*str.rpartition(self, sep))

    def _three(self, head: str, sep: str, tail: str) -> tuple[str, str, str]:
        cut = len(self) - len(tail)
        return self[: len(head)], self[len(head) : cut], self[cut:]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> MarkedText:
        if not old:
            return blurred(str.replace(self, old, new, count), (self, new))
        return join(new, self.split(old, count))

    def join(self, items: Iterable[str], /) -> MarkedText:
        return join(self, items)


def _keeps_length(name: str) -> Callable[..., MarkedText]:
    plain = getattr(str, name)

    def method(self: MarkedText) -> MarkedText:
        text = plain(self)
        return MarkedText(text, self.spans) if len(text) == len(self) else blurred(text, self)

    method.__name__ = name
    return method


def _loses_spans(name: str) -> Callable[..., MarkedText]:
    plain = getattr(str, name)

    def method(self: MarkedText, *args: Any, **kwargs: Any) -> MarkedText:
        return blurred(plain(self, *args, **kwargs), (self, args, kwargs))

    method.__name__ = name
    return method


for _name in ("lower", "upper", "title", "capitalize", "swapcase", "casefold"):
    setattr(MarkedText, _name, _keeps_length(_name))
for _name in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate", "__mod__"):
    setattr(MarkedText, _name, _loses_spans(_name))


def as_marked(text: str) -> MarkedText:
    """Any string as one with marks; a plain one has none."""
    return text if isinstance(text, MarkedText) else MarkedText(text, ())


def spans_of(text: str) -> Spans:
    """The outside characters of any string."""
    return text.spans if isinstance(text, MarkedText) else ()


def level_within(text: str, start: int, end: int) -> int:
    """Highest level among characters [start, end); 0 when the template wrote them all."""
    spans = spans_of(text)
    low, high = 0, len(spans)
    while low < high:  # the first span that ends behind start
        middle = (low + high) // 2
        if spans[middle][1] <= start:
            low = middle + 1
        else:
            high = middle
    level = 0
    while low < len(spans) and spans[low][0] < end and start < end:
        level = max(level, spans[low][2])
        low += 1
    return level


def concat(parts: Iterable[str]) -> MarkedText:
    """The parts one after another."""
    parts = list(parts)
    spans: list[tuple[int, int, int]] = []
    offset = 0
    for part in parts:
        for start, end, level in spans_of(part):
            if spans and spans[-1][1:] == (offset + start, level):
                spans[-1] = (spans[-1][0], offset + end, level)
            else:
                spans.append((offset + start, offset + end, level))
        offset += len(part)
    return MarkedText("".join(parts), tuple(spans))


def join(between: str, items: Iterable[str]) -> MarkedText:
    """The items with ``between`` between them."""
    parts = [part for item in items for part in (between, item)]
    return concat(parts[1:])


def blurred(text: str, sources: Any) -> MarkedText:
    """``text``, made of ``sources`` in a way that spans do not follow."""
    return MarkedText(text, _whole(len(text), level_of(sources)))


def level_of(value: Any) -> int:
    """The highest level of the strings in ``value``, looking into containers (see ``measure``)."""
    return measure(value).level


class Measure(NamedTuple):
    """level: highest of its strings. items: all of them, nested too. chars: of all its strings."""

    level: int
    items: int
    chars: int


def measure(value: Any) -> Measure:
    """How much a JSON-like value holds, counting what it holds twice twice.

    OverflowError for more than MAX_ITEMS: thirty lists inside one another can hold a billion.
    """
    level, chars, seen, todo = 0, 0, 0, [value]
    while todo:
        item = todo.pop()
        seen += 1
        if isinstance(item, str):
            chars += len(item)
            level = max(level, max((span[2] for span in spans_of(item)), default=0))
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        if seen + len(todo) > MAX_ITEMS:
            raise OverflowError(f"a value holds more than {MAX_ITEMS:,} items")
    return Measure(level, seen, chars)


def marked(value: Any, level: int = OUTSIDE) -> Any:
    """A copy of a JSON-like value with all its strings, keys too, from outside at ``level``."""
    if isinstance(value, str):
        return MarkedText(value, _whole(len(value), level))
    if isinstance(value, Mapping):
        return {marked(key, level): marked(item, level) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(item, level) for item in value]
    return value


def filled_in(fill: Callable[[Any], str], values: tuple[Any, ...] | dict[str, Any]) -> MarkedText:
    """What ``fill`` makes by putting ``values`` into a text of the template's.

    Outside strings among the values are fenced while it works, so that they are found again.
    """
    opener, closer = _FENCES
    items = list(values.values() if isinstance(values, dict) else values)
    fenced = [item for item in items if isinstance(item, str) and spans_of(item)]
    if not fenced or any(fence in item for item in fenced for fence in _FENCES):
        return blurred(fill(values), values)

    def fence(item: Any) -> Any:
        outside = isinstance(item, str) and spans_of(item)
        return f"{opener}{item:s}{closer}" if outside else item

    if isinstance(values, dict):
        text = fill({key: fence(item) for key, item in values.items()})
    else:
        text = fill(tuple(map(fence, values)))
    level = level_of(values)
    before, *pieces = text.split(opener)
    if closer in before or any(piece.count(closer) != 1 for piece in pieces):
        return blurred(text.replace(opener, "").replace(closer, ""), values)
    parts = [before]
    for piece in pieces:
        inside, _, outside = piece.partition(closer)
        parts += [MarkedText(inside, _whole(len(inside), level)), outside]
    return concat(parts)


def _whole(length: int, level: int) -> Spans:
    return ((0, length, level),) if length and level else ()


def _cut(spans: Spans, start: int, stop: int) -> Spans:
    return tuple(
        (max(begin, start) - start, min(end, stop) - start, level)
        for begin, end, level in spans
        if begin < stop and end > start
    )


def _runs(levels: list[int]) -> Spans:
    found, start = [], 0
    for level, run in groupby(levels):
        end = start + sum(1 for _ in run)
        if level:
            found.append((start, end, level))
        start = end
    return tuple(found)
