"""The environment chat templates run in: no files, no insides of Python, bounded work, marks kept.

A template comes with downloaded weights, so it may be hostile or broken. Jinja's immutable sandbox
keeps it from files and from Python's insides; on top of that loops, calls, filters and operators
are paid for from a ``Budget``, so that no template hangs or fills the memory. The same places keep
the marks of ``MarkedText``. Knows no messages and no tokens.

White space and extras are those of Hugging Face's chat templates: trim_blocks, lstrip_blocks, break
and continue, tojson without HTML escapes, raise_exception, strftime_now. Block tags that are not
known (``{% generation %}`` and others made for training) are dropped, what they enclose stays.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from itertools import islice
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, Template, Undefined, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.lexer import Token, TokenStream
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from strata.core.errors import TemplateError
from strata.formats.marked_text import (
    MAX_ITEMS,
    MarkedText,
    as_marked,
    blurred,
    concat,
    filled_in,
    join,
    spans_of,
)
from strata.formats.template_limits import (
    MAX_CHARS,
    Budget,
    check_format,
    check_numbers,
    check_percent,
)

_LOG = logging.getLogger(__name__)

_KNOWN_TAGS = frozenset({
    "for", "endfor", "else", "elif", "if", "endif", "block", "endblock", "extends", "print",
    "macro", "endmacro", "include", "from", "import", "set", "endset", "with", "endwith", "call",
    "endcall", "filter", "endfilter", "break", "continue",
})  # fmt: skip
# Filters whose result has its own marks or is one of the values given to them.
_EXACT_FILTERS = frozenset({
    "trim", "upper", "lower", "capitalize", "string", "safe", "default", "d", "first", "last",
    "min", "max", "random", "reverse", "attr", "join", "replace", "format", "strata_concat",
    "strata_slice", "strata_compared",
})  # fmt: skip
# Filters that go through everything they are given, nested values too.
_DEEP_FILTERS = frozenset({
    "sort", "unique", "groupby", "min", "max", "dictsort", "center", "indent",
    "truncate", "title", "escape", "e", "forceescape", "format", "striptags", "urlencode",
    "wordcount", "filesizeformat", "tojson",
})  # fmt: skip
_WIDE = frozenset({
    "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "slice",
    "batch", "round", "tojson",
})  # fmt: skip
_REMOVED_FILTERS = ("urlize", "pprint", "xmlattr", "wordwrap")


class _InnerTextOfUnknownTags(Extension):
    """Drops block tags that are not known, keeps what lies between them."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Tokens of the template without those of unknown tags."""
        dropped: set[str] = set()
        for token in stream:
            name = stream.current
            if token.type != "block_begin" or name.type != "name" or name.value in _KNOWN_TAGS:
                yield token
                continue
            dropped.add(name.value)
            while not stream.eos and stream.current.type != "block_end":
                next(stream)
            next(stream)
        if dropped:
            _LOG.info("chat template tags that are ignored: %s", ", ".join(sorted(dropped)))


class _PaidAndMarked(NodeTransformer):
    """Sends loops, slices, comparisons and ``~`` through filters, having no hooks of their own."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """What is looped over is paid for."""
        self.generic_visit(node)
        node.iter = _filter(node.iter, "strata_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """``a ~ b``."""
        self.generic_visit(node)
        return _filter(nodes.List(list(node.nodes)), "strata_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """``a == b``, ``a in b``: the work grows with a."""
        self.generic_visit(node)
        node.expr = _filter(node.expr, "strata_compared")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """``a[b:c]``."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, "strata_slice", *(b or nodes.Const(None) for b in bounds))


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders templates, one rendering at a time, each with a new ``budget``."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=pass_context(lambda context, value: self.text_of(value)),
            extensions=[LoopControlExtension, _InnerTextOfUnknownTags],
        )
        self.budget = Budget()
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        for name in _REMOVED_FILTERS:
            self.filters.pop(name)
        self.filters |= self._own_filters()
        self.filters = {name: self._guard(name, run) for name, run in self.filters.items()}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self._compares(run) for name, run in tests.items()}

    def _own_filters(self) -> dict[str, Callable[..., Any]]:
        text = self.text_of
        return {
            "tojson": _to_json,
            "string": text,
            "trim": lambda value, chars=None: text(value).strip(chars),
            "upper": lambda value: text(value).upper(),
            "lower": lambda value: text(value).lower(),
            "capitalize": lambda value: text(value).capitalize(),
            "join": self._join,
            "replace": self._replace,
            "safe": lambda value: value,
            "format": lambda value, *args, **kwargs: _percent(text(value), kwargs or args),
            "sum": self._sum,
            "strata_concat": self._concat,
            "strata_items": self._items,
            "strata_compared": self._compared,
            "strata_slice": lambda value, *bounds: value[slice(*bounds)],
        }

    def compiled(self, source: str) -> Template:
        """The template in ``source``; jinja2's errors when it is none."""
        tree = self.parse(source)
        _PaidAndMarked().visit(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def text_of(self, value: Any) -> str:
        """How a value is printed. A value that is no text has no text of the template's."""
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, (bool, int, float, Undefined)):
            return str(value)
        self.budget.walk(value)
        return MarkedText(str(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator in the template."""
        self.budget.operator(operator, left, right)
        if operator == "%" and isinstance(left, str):
            self.budget.walk(right)
            check_percent(left)
            return _percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in the template; methods of plain text follow the marks of their arguments."""
        env, run = __self, __obj
        env.budget.spend()
        owner = getattr(run, "__self__", None)
        name = getattr(run, "__name__", "")
        if isinstance(owner, str):
            env._pay_for_method(name, owner, args)
            if type(owner) is str and isinstance(run, BuiltinMethodType):
                run = getattr(as_marked(owner), name)
        elif isinstance(owner, (list, tuple)):
            env.budget.walk(owner)
        result = super().call(__context, run, *args, **kwargs)
        env.budget.made(result)
        # Macros keep marks in their bodies; containers give out what they hold.
        if isinstance(run, Macro) or isinstance(owner, (str, Mapping, list, tuple)):
            return result
        if isinstance(result, MarkedText):
            return result
        return _blurred(result, (args, kwargs))

    def _pay_for_method(self, name: str, owner: str, args: tuple[Any, ...]) -> None:
        if name in _WIDE:
            check_numbers(args)
        elif name == "replace" and len(args) >= 2:
            self.budget.replacing(owner, args[0], args[1])
        elif name == "join" and args and isinstance(args[0], (list, tuple)):
            self.budget.joining(owner, (item for item in args[0] if isinstance(item, str)))
        elif name in ("encode", "translate", "maketrans"):
            raise TemplateError(f"chat templates may not use the text method {name}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``"...".format``: what it fills in keeps its marks."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None
        template: str = value.__self__

        def fill(*args: Any, **kwargs: Any) -> str:
            self.budget.walk((args, kwargs))
            check_format(template)
            if isinstance(template, MarkedText) or (args and kwargs):
                return blurred(plain(*args, **kwargs), (template, args, kwargs))
            if kwargs:
                return filled_in(lambda values: plain(**values), kwargs)
            return filled_in(lambda values: plain(*values), args)

        return fill

    def _guard(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            given = [arg for arg in args if not isinstance(arg, _JINJA_ARGUMENTS)]
            self.budget.spend()
            if name in _WIDE:
                check_numbers([*given, *kwargs.values()])
            if name in _DEEP_FILTERS:
                self.budget.walk(given)
            if name == "format":
                check_percent(str(given[0]))
            result = run(*args, **kwargs)
            self.budget.made(result)
            return result if name in _EXACT_FILTERS else _blurred(result, (given, kwargs))

        return guarded

    def _compares(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.compare(args[0] if len(args) > 1 else None)
            return run(*args, **kwargs)

        return guarded

    def _concat(self, values: Iterable[Any]) -> str:
        parts: list[str] = []
        n_chars = 0
        for value in values:
            part = self.text_of(value)
            n_chars += len(part)
            self.budget.spend(len(part) + 1)
            parts.append(part)
            if n_chars > MAX_CHARS:
                self.budget.text(n_chars)
        return concat(parts)

    def _items(self, values: Any) -> list[Any]:
        items = list(islice(iter(values), MAX_ITEMS + 1))
        self.budget.items(len(items))
        return items

    def _compared(self, value: Any) -> Any:
        self.budget.compare(value)
        return value

    def _attributes(self, values: Any, attribute: str | int | None) -> list[Any]:
        items = self._items(values)
        return items if attribute is None else [*map(make_attrgetter(self, attribute), items)]

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        texts = [self.text_of(item) for item in self._attributes(value, attribute)]
        between = self.text_of(d)
        self.budget.joining(between, texts)
        return join(between, texts)

    def _sum(self, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if not isinstance(start, (int, float)):  # adding lists up takes quadratic time
            raise TemplateError("chat templates may only sum numbers")
        return sum(self._attributes(iterable, attribute), start)

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = (self.text_of(value) for value in (s, old, new))
        self.budget.replacing(text, old, new)
        return as_marked(text).replace(old, new, -1 if count is None else count)


_JINJA_ARGUMENTS = (Context, EvalContext, Environment)
"""What jinja2 puts before a filter's own arguments."""


def _blurred(result: Any, sources: Any) -> Any:
    """A text result whose marks are unknown; other results as they are."""
    return blurred(result, sources) if isinstance(result, str) else result


def _percent(template: str, values: Any) -> str:
    """``template % values``."""
    if spans_of(template):
        return blurred(str.__mod__(template, values), (template, values))
    given = values if isinstance(values, (tuple, dict)) else (values,)
    return filled_in(lambda fenced: str.__mod__(template, fenced), given)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as Hugging Face's templates expect it."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))
