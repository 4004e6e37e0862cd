"""Messages of the Anthropic API and items of the OpenAI responses API, as template input.

Pure functions beside ``prompt``, which has the shared pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strata.core.errors import InputError, UnsupportedError
from strata.formats.text import quoted
from strata.serve.text.prompt import (
    Builder,
    Conversation,
    ToolChoice,
    part_text,
    require_tools,
    text_of,
    tool_of,
    unique,
)
from strata.serve.text.specs import ToolSpec
from strata.serve.text.template_style import TemplateStyle


def anthropic_messages(system: Any, messages: Sequence[Any], style: TemplateStyle) -> Conversation:
    """Messages of /v1/messages. Results of tools inside a user message become messages of their
    own, in order."""
    builder = Builder(style)
    if system:
        builder.add("system", text_of(system, "system"))
    for i, message in enumerate(messages):
        place = f"message {i}"
        if not isinstance(message, Mapping):
            raise InputError(f"{place} must be an object with a role")
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple):
            raise InputError(f"the content of {place} must be text or a list of blocks")
        if role == "assistant":
            _anthropic_answer(builder, content, place)
        elif role == "user":
            _anthropic_question(builder, content, place)
        elif role == "system":
            builder.add("system", text_of(content, place))
        else:
            raise InputError(
                f"{place} has the role {quoted(str(role), 40)}; known are user and assistant"
            )
    return builder.made


def _anthropic_answer(builder: Builder, blocks: Sequence[Any], place: str) -> None:
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            thinking.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            builder.made.warnings.append(f"block {n} of {place} is thinking nobody can read")
        elif kind == "tool_use":
            where = f"block {n} of {place}"
            calls.append(builder.call(
                str(block.get("id", "")), str(block.get("name") or ""), block.get("input"), where
            ))  # fmt: skip
        else:
            texts.append(part_text(block, place))
    builder.assistant("\n".join(texts) if texts else None, "\n".join(thinking) or None, calls)


def _anthropic_question(builder: Builder, blocks: Sequence[Any], place: str) -> None:
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            if texts:
                builder.add("user", "\n".join(texts))
                texts = []
            id = str(block.get("tool_use_id", ""))
            result = text_of(block.get("content"), f"the tool result in {place}") or ""
            failed = bool(block.get("is_error"))
            result = f"error: {result}".rstrip() if failed else result
            builder.tool_result(id, result, f"a block of {place}")
        else:
            texts.append(part_text(block, place))
    if texts or not blocks:
        builder.add("user", "\n".join(texts))


def anthropic_tools(tools: Iterable[Any] | None) -> list[ToolSpec]:
    """Tools of /v1/messages; those that Anthropic's own servers run are refused by name."""
    found: list[ToolSpec] = []
    for i, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "custom"):
            raise UnsupportedError(
                f"tool {i} has the type {quoted(str(kind), 40)}, which runs on other servers; only "
                f"tools with an input_schema can be called here"
            )
        found.append(tool_of(tool, "input_schema", f"tool {i}"))
    return unique(found)


def anthropic_tool_choice(choice: Any, tools: Sequence[ToolSpec]) -> ToolChoice:
    """tool_choice of /v1/messages."""
    if choice is None:
        return ToolChoice()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    parallel = isinstance(choice, Mapping) and not choice.get("disable_parallel_tool_use")
    if kind == "auto":
        return ToolChoice("auto", None, parallel)
    if kind == "none":
        return ToolChoice("none")
    if kind == "any":
        return require_tools(ToolChoice("required", None, parallel), tools)
    if kind == "tool":
        return require_tools(ToolChoice("required", str(choice.get("name")), False), tools)
    raise InputError(
        f"tool_choice has the type {quoted(str(kind), 40)}; known are auto, any, tool and none"
    )


def responses_messages(instructions: Any, items: Any, style: TemplateStyle) -> Conversation:
    """Input of /v1/responses: a text, or messages, calls, results and thinking in order."""
    builder = Builder(style)
    if instructions:
        builder.add("system", text_of(instructions, "instructions"))
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list | tuple):
        raise InputError("input must be text or a list of items")
    answer = _Answer(builder)
    for i, item in enumerate(items):
        place = f"input item {i}"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            answer.think(item, place)
        elif kind == "function_call":
            call_id = str(item.get("call_id") or item.get("id") or "")
            name = str(item.get("name") or "")
            answer.calls.append(builder.call(call_id, name, item.get("arguments"), place))
        elif kind == "function_call_output":
            answer.close()
            output = text_of(item.get("output"), place) or ""
            builder.tool_result(str(item.get("call_id", "")), output, place)
        elif kind == "message" and item.get("role") == "assistant":
            answer.texts.append(text_of(item.get("content"), place) or "")
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            answer.close()
            builder.add(item["role"], text_of(item.get("content"), place) or "")
        else:
            raise UnsupportedError(f"{place} is of type {quoted(str(kind), 40)}, not known here")
    answer.close()
    return builder.made


class _Answer:
    """Items of one earlier answer: thinking, text and calls stand apart in the responses API."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self.texts: list[str] = []
        self.thinking: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def think(self, item: Mapping[str, Any], place: str) -> None:
        """A reasoning item; its content counts, or else its summary."""
        if self.texts or self.calls:
            self.close()
        for part in item.get("content") or item.get("summary") or ():
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                raise InputError(f"{place} has a part without text")
            self.thinking.append(text)

    def close(self) -> None:
        """The answer is over."""
        if self.texts or self.calls or self.thinking:
            self._builder.assistant(
                "\n".join(self.texts) if self.texts else None,
                "\n".join(self.thinking) or None,
                self.calls,
            )
        self.texts, self.thinking, self.calls = [], [], []
