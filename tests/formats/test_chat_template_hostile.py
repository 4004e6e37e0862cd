"""Chat templates that come with downloaded weights cannot reach files, hang or fill the memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from strata.core.errors import TemplateError
from strata.formats.chat_template import ChatTemplate

GROW = "{% set n = namespace(x=X, y=X) %}{% for i in range(60) %}{% set n.x = DO %}{% endfor %}"
NESTED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)


def grow(start: str, step: str) -> str:
    """A template that does ``step`` to n.x sixty times."""
    return GROW.replace("X", start, 1).replace("X", start).replace("DO", step)


TOO_MUCH = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "text times number": "{{ 'a' * 10**12 }}",
    "list times number": "{{ [1] * 10**12 }}",
    "doubled by ~": grow("'ab'", "n.x ~ n.x"),
    "doubled by +": grow("'ab'", "n.x + n.x"),
    "doubled list": grow("[1]", "n.x + n.x"),
    "doubled by join": grow("'ab'", "[n.x, n.x] | join"),
    "doubled by replace": grow("'ab'", "n.x | replace('a', n.x)"),
    "doubled by method": grow("'ab'", "n.x.replace('a', n.x)"),
    "doubled by format": grow("'ab'", "'{0}{0}'.format(n.x)"),
    "doubled by %": grow("'ab'", "'%s%s' % (n.x, n.x)"),
    "doubled by set block": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "squared number": grow("10", "n.x * n.x"),
    "power": "{{ 10 ** 10 ** 9 }}" + grow("10", "n.x ** 9"),
    "center": "{{ 'a' | center(10**10) }}",
    "center method": "{{ 'a'.center(10**10) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "slices": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "output": "{% set a = 'a' * 1000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested loops": "{% for a in [1] %}" * 300 + "{% endfor %}" * 300,
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_growth_is_refused_before_it_happens(name: str) -> None:
    # Expectation: TemplateError, soon and within 200 MiB (a text at the limit has 16 to 64).
    template = ChatTemplate(TOO_MUCH[name])
    tracemalloc.start()
    with pytest.raises(TemplateError):
        template.render([])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


@pytest.mark.parametrize(
    "use",
    ["{{ n.x }}", "{{ n.x | tojson }}", "{{ n.x == n.y }}", "{{ n.x is eq n.y }}",
     "{{ [n.x, n.y] | sort }}", "{{ '%s' % [n.x] }}", "{{ n.x | string }}",
     "{{ [n.x].count(n.y) }}"],
)  # fmt: skip
def test_lists_that_hold_themselves_many_times(use: str) -> None:
    # Expectation: 2**60 items in sixty small lists: going through them is refused, soon.
    start = time.process_time()
    with pytest.raises(TemplateError):
        ChatTemplate(NESTED + use).render([])
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(90) }}",
        "{% for a in [[[[1] * 99] * 99] * 99] * 99 recursive %}{{ loop(a) if a is iterable }}"
        "{% endfor %}",
        "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{{ a.count('b') }}{% endfor %}",
    ],
)
def test_long_work_ends(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Expectation: the budget or the deadline (here half a second) ends it with our error.
    monkeypatch.setattr("strata.formats.chat_template.DEADLINE_S", 0.5)
    start = time.process_time()
    with pytest.raises(TemplateError, match="too much work|nested too deep"):
        ChatTemplate(template).render([])
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "template",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.encode() }}",
        "{{ lipsum() }}",
    ],
)
def test_no_way_out(template: str) -> None:
    # Expectation: jinja2's sandbox (and ours on top) refuses; nothing of Python is printed.
    with pytest.raises(TemplateError):
        ChatTemplate(template).render([{"role": "user", "content": "{0.__class__}"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | attr('__class__') }}", ""),
        ("{{ messages[0].content.format.__globals__ }}", ""),
        ("{{ raise_exception.__globals__ }}", ""),
        ("{{ messages[0].content.format(1) }}", ""),
        ("{% autoescape true %}{{ '<' }}{% endautoescape %}", "<"),
        ("{{ '100% {\"year\": 2024}' }} {{ '{\"year\": 2024} %s' % 1 }}", None),
    ],
)
def test_harmless_all_the_same(template: str, expected: str | None) -> None:
    # Expectation: jinja2's undefined prints as nothing; wide-looking text is no width.
    text = str(ChatTemplate(template).render([{"role": "user", "content": "{0.__class__}"}]))
    assert text == ('100% {"year": 2024} {"year": 2024} 1' if expected is None else expected)


def test_honest_templates_have_room() -> None:
    # Expectation: two million characters and 2,000 messages are far from the limits.
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% endfor %}"
    )
    big = "x" * 2_000_000
    assert len(template.render([{"role": "user", "content": big}])) > 2_000_000
    many = [{"role": "user", "content": "some words of a message"}] * 2000
    assert template.render(many).count("<|im_start|>") == 2000
