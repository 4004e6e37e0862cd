"""What a chat template wants of its input, found out by trying it and by the variables it names.

Templates agree on roles and text, but not on tool calls (arguments as an object or as JSON text),
on where earlier thinking goes, and on how thinking is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import jinja2

from strata.core.errors import StrataError
from strata.formats.chat_template import ChatTemplate

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS: tuple[Effort, ...] = ("none", "minimal", "low", "medium", "high", "xhigh")
_THREE_LEVELS = {"none": "low", "minimal": "low", "xhigh": "high"}
_KEY, _VALUE = "q7k", "z4v"
_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'


@dataclass(frozen=True)
class TemplateStyle:
    """object_arguments: calls' arguments are given as objects, else as JSON text.
    text_arguments: a text that is no JSON can be given as it is.
    calls: earlier calls are shown to the model at all.
    developer: the template knows the role. thinking_key: where earlier thinking goes.
    variables: those of ``effort_variables`` that the template reads."""

    object_arguments: bool = True
    text_arguments: bool = True
    calls: bool = True
    developer: bool = False
    thinking_key: str = "reasoning_content"
    variables: frozenset[str] = frozenset()


def style_of(source: str) -> TemplateStyle:
    """The style of a template's source; the usual one for a template that fails on everything."""
    as_object = _prints_call(source, {_KEY: _VALUE})
    as_text = _prints_call(source, _TEXT)
    names = ("enable_thinking", "reasoning_effort")
    variables = {name for name in names if re.search(rf"\b{name}\b", source)}
    if re.search(r"(?<![.\w])thinking is (?:not )?defined", source):
        variables.add("thinking")
    in_messages = re.search(r"\.thinking\b|\[['\"]thinking['\"]\]", source)
    return TemplateStyle(
        object_arguments=as_object or not as_text,
        text_arguments=as_text or _renders(source, _TEXT),
        calls=_shows_calls(source),
        developer=re.search(r"['\"]developer['\"]", source) is not None,
        thinking_key="thinking" if in_messages else "reasoning_content",
        variables=frozenset(variables),
    )


def effort_variables(style: TemplateStyle, effort: Effort) -> dict[str, Any]:
    """Template variables that ask for an effort of thinking; empty when the template has none."""
    thinks = effort != "none"
    values: dict[str, Any] = {
        "enable_thinking": thinks,
        "thinking": thinks,
        "reasoning_effort": _THREE_LEVELS.get(effort, effort),
    }
    return {name: values[name] for name in style.variables}


def effort_warning(style: TemplateStyle, effort: Effort) -> str | None:
    """What a template cannot do about an effort of thinking; None when it takes it as it is."""
    if not style.variables:
        return "this model's template knows no effort of thinking"
    if "reasoning_effort" not in style.variables:
        if effort == "none":
            return None
        return "this model's template turns thinking on or off; it knows no levels of effort"
    nearest = _THREE_LEVELS.get(effort)
    if nearest is None or effort == "none" and len(style.variables) > 1:
        return None
    return f"the effort {effort} is given to this model's template as {nearest}"


def unread(source: str, names: Iterable[str]) -> list[str]:
    """Those of the variables that a template never reads."""
    read = _names(source)
    return [name for name in names if name not in read]


@lru_cache(maxsize=8)
def _names(source: str) -> frozenset[str]:
    """Names in a template's code: not in its text, comments or strings, and no attributes."""
    try:
        lexed = jinja2.Environment().lex(source)
        tokens = [(kind, word) for _, kind, word in lexed if kind != "whitespace"]
    except jinja2.TemplateError:
        return frozenset(re.findall(r"\w+", source))
    return frozenset(
        word for (_, before), (kind, word) in pairwise(tokens) if kind == "name" and before != "."
    )


def _prints_call(source: str, arguments: Any) -> bool:
    """Whether a call with these arguments is printed plainly: not quoted twice, not as Python."""
    text = _rendered(source, arguments)
    if text is None or _KEY not in text or _VALUE not in text:
        return False
    return not any(sign + _KEY in text for sign in ('\\"', "'"))


def _shows_calls(source: str) -> bool:
    """Whether calls reach the prompt in any form; taken so of a template that fails on them."""
    texts = [_rendered(source, arguments) for arguments in ({_KEY: _VALUE}, _TEXT)]
    rendered = [text for text in texts if text is not None]
    return not rendered or any(_VALUE in text for text in rendered)


def _renders(source: str, arguments: Any) -> bool:
    text = _rendered(source, arguments)
    return text is not None and _VALUE in text


def _rendered(source: str, arguments: Any) -> str | None:
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "call_0", "name": "probe"},
    ]
    tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
    named = {"bos_token": "", "eos_token": ""}
    try:
        return str(ChatTemplate(source, named).render(messages, tools=[tool]))
    except StrataError:
        return None
