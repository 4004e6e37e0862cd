"""A chat template: messages to the text of a prompt, which knows who wrote each of its characters.

How forged control tokens are kept out: before rendering, every string from outside (messages,
tools, variables) becomes a ``MarkedText``, and the sandbox keeps the marks through whatever the
template does. Template logic sees the real strings, so tests for ``</think>``, splits and strips do
what they always do; what comes out is a text with the spans that came from outside, and only what
lies outside those spans may stand for control tokens. Roles of the usual names are not marked,
since templates build tokens from them (``'<|' + role + '|>'``).

Knows no token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2

from strata.core.errors import InputError, StrataError, TemplateError, UnsupportedError
from strata.formats.marked_text import ASSISTANT, OUTSIDE, MarkedText, as_marked, join, marked
from strata.formats.template_limits import DEADLINE_S, MAX_CHARS, Budget
from strata.formats.template_sandbox import TemplateEnvironment
from strata.formats.text import quoted

_ROLES = frozenset({
    "system", "user", "assistant", "tool", "developer", "function", "model", "ipython",
    "environment", "observation",
})  # fmt: skip
_PROBE = "a7c41f"
_CUT = "z9q5end"
_PROBE_DEADLINE_S = 2.0


class ChatTemplate:
    """One template of a checkpoint. Compiled at first use, so that a broken one harms nobody else.

    source: jinja2. named: special tokens as templates know them ("bos_token": "<s>"). now: the
    clock of strftime_now.
    """

    def __init__(
        self,
        source: str,
        named: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._named = dict(named or {})
        self._environment = TemplateEnvironment(now)
        self._lock = threading.RLock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **template_vars: Any,
    ) -> MarkedText:
        """The prompt's text.

        continue_final: end it right behind the last message's content, which the answer then goes
        on from (without a generation prompt). TemplateError where the template has no such place.

        messages: objects with a role and content (a string, None, or parts of type "text"), and
        whatever else the template knows (tool_calls, reasoning_content).
        TemplateError when the template refuses them (with its own message), fails or is hostile;
        UnsupportedError for content that is not text; InputError for what is no conversation.
        """
        with self._lock:
            if continue_final and messages:
                messages = [*messages[:-1], _with_cut(messages[-1])]
                add_generation_prompt = False
            mine = [self._message(message, i) for i, message in enumerate(messages)]
            text = self._run(
                DEADLINE_S,
                messages=mine,
                tools=marked(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **{name: marked(value) for name, value in template_vars.items()},
            )
        return _cut_off(text) if continue_final else text

    def _run(self, deadline_s: float, **variables: Any) -> MarkedText:
        """One rendering, with its own budget; every failure becomes a TemplateError."""
        self._environment.budget = Budget(deadline_s)
        try:
            return as_marked(self._compiled.render({**self._named, **variables}))
        except StrataError:
            raise
        except RecursionError:
            raise TemplateError("the chat template is nested too deep") from None
        except Exception as error:  # a template can fail in any way Python can
            raise TemplateError(f"the chat template failed: {error}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > MAX_CHARS:
            raise TemplateError(f"the chat template has {len(self.source):,} characters")
        try:
            return self._environment.compiled(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid (line {error.lineno}): {error.message}"
            ) from None

    def _message(self, message: Any, i: int) -> dict[str, Any]:
        """A copy for the template: outside strings marked, content in a form that it knows."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"message {i} must be an object with a role, it is {message!r:.80}")
        role = message["role"]
        mine: dict[str, Any] = marked(message, ASSISTANT if role == "assistant" else OUTSIDE)
        if role in _ROLES:
            mine["role"] = role
        content = mine.get("content")
        if isinstance(content, list):
            mine["content"] = self._parts(content, i)
        elif isinstance(content, str) and not self._takes_text and self._takes_parts:
            mine["content"] = [{"type": "text", "text": content}]
        elif content is not None and not isinstance(content, str):
            raise InputError(f"the content of message {i} must be text or a list of parts")
        return mine

    def _parts(self, content: list[Any], i: int) -> Any:
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                raise UnsupportedError(
                    f"message {i} has a content part of type {quoted(str(kind))}; only text parts "
                    f"are supported"
                )
            if not isinstance(part.get("text"), str):
                raise InputError(f"message {i} has a text part without text")
        if self._takes_parts:
            return content
        return join("\n", (part["text"] for part in content))

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template prints content that is a string."""
        return self._prints(_PROBE)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template knows content that is a list of parts."""
        return self._prints([{"type": "text", "text": _PROBE}])

    def _prints(self, content: Any) -> bool:
        try:
            text = self._run(
                _PROBE_DEADLINE_S,
                messages=[{"role": "user", "content": content}],
                tools=None,
                add_generation_prompt=False,
            )
        except TemplateError:
            return False
        # A list printed as it is shows its quotes.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _with_cut(message: Any) -> Any:
    """The message with a word behind its content that shows where it ends in the prompt: found
    again whatever the template strips or adds."""
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if not content or isinstance(content, str):
        return {**message, "content": f"{content or ''}{_CUT}"}
    last = content[-1] if isinstance(content, list) else None
    if not isinstance(last, Mapping) or not isinstance(last.get("text"), str):
        return message
    return {**message, "content": [*content[:-1], {**last, "text": f"{last['text']}{_CUT}"}]}


def _cut_off(text: MarkedText) -> MarkedText:
    at = text.rfind(_CUT)
    if at < 0:
        raise TemplateError(
            "the chat template does not print the end of the last message, so that it cannot be "
            "continued; end the conversation with another message"
        )
    return text[:at]
