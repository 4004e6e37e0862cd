"""Messages of the OpenAI chat API in the form that chat templates take. Pure functions.

Everything a client may send is either carried over or refused with one line that names its place.
Broken arguments of an earlier call are carried over as text, with a warning: a chat that holds one
must stay usable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from strata.core.errors import InputError, UnsupportedError
from strata.formats.text import quoted
from strata.serve.text.specs import ToolSpec
from strata.serve.text.template_style import TemplateStyle

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass
class Conversation:
    """messages: for the template. warnings: for the log."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ToolChoice:
    """mode: auto, none (no calls) or required. only: the one tool that may be called.
    parallel: whether an answer may hold several calls."""

    mode: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    parallel: bool = True


class Builder:
    """Collects template messages; the same for every API."""

    def __init__(self, style: TemplateStyle) -> None:
        self.style = style
        self.made = Conversation()
        self._names: dict[str, str] = {}

    def add(self, role: str, content: str | None, **more: Any) -> None:
        """A message. System messages at the begin become one: most templates take one."""
        if role == "developer" and not self.style.developer:
            role = "system"
        last = self.made.messages[-1] if self.made.messages else None
        leading = all(m["role"] == role for m in self.made.messages)
        if last and leading and role in ("system", "developer"):
            last["content"] = "\n\n".join(filter(None, (last["content"], content)))
            return
        self.made.messages.append({"role": role, "content": content, **more})

    def assistant(
        self, text: str | None, thinking: str | None, calls: Sequence[dict[str, Any]]
    ) -> None:
        """An earlier answer. Templates of gpt-oss refuse thinking and text beside calls: text
        stays."""
        more: dict[str, Any] = {}
        if calls:
            more["tool_calls"] = list(calls)
        if thinking and not (self.style.thinking_key == "thinking" and calls and text):
            more[self.style.thinking_key] = thinking
        self.add("assistant", text if text is not None or not calls else "", **more)

    def call(self, id: str, name: str, arguments: Any, place: str) -> dict[str, Any]:
        """A call of an earlier answer; arguments: an object, or text that should be JSON."""
        if not name:
            raise InputError(f"{place} has no name")
        self._names[id] = name
        return {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": self._arguments(arguments, place)},
        }

    def tool_result(self, id: str, content: str, place: str, name: str | None = None) -> None:
        """What a call gave back; InputError for one that nobody has made before."""
        if id not in self._names:
            raise InputError(
                f"{place} is the result of a tool call {quoted(id, 60)} that no earlier message of "
                f"the assistant has made; send that message too, or leave the result away"
            )
        name = name or self._names.get(id)
        self.add("tool", content, tool_call_id=id, **({"name": name} if name else {}))

    @property
    def last_call(self) -> str:
        """The id of the call that was made last, for results that name none."""
        return next(reversed(self._names), "call_0")

    def _arguments(self, arguments: Any, place: str) -> Any:
        value = arguments
        if isinstance(arguments, str):
            try:
                value = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                value = None
        elif arguments is None:
            value = {}
        if isinstance(value, Mapping):
            object_form = self.style.object_arguments
            return dict(value) if object_form else json.dumps(value, ensure_ascii=False)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self.made.warnings.append(
            f"{place} has arguments that are no JSON object ({quoted(text, 60)}); they are passed "
            f"on as text"
        )
        return text if self.style.text_arguments else {"arguments": text}


def openai_messages(messages: Sequence[Any], style: TemplateStyle) -> Conversation:
    """Messages of /v1/chat/completions. InputError or UnsupportedError names the message."""
    builder = Builder(style)
    for i, message in enumerate(messages):
        place = f"message {i}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{place} must be an object with a role")
        role = message["role"]
        content = text_of(message.get("content"), place)
        if role in ("system", "developer", "user"):
            if content is None:
                raise InputError(f"{place} ({role}) has no content")
            builder.add(role, content)
        elif role == "assistant":
            thinking = message.get("reasoning_content") or message.get("reasoning")
            calls = message.get("tool_calls") or ()
            if not isinstance(calls, list | tuple):
                raise InputError(f"tool_calls of {place} must be a list")
            old = message.get("function_call")
            calls = [*calls, {"id": "call_0", "function": old}] if old else calls
            builder.assistant(
                content if content is not None else _refusal(message),
                thinking if isinstance(thinking, str) else None,
                [_openai_call(builder, call, f"tool call {n} of {place}")
                 for n, call in enumerate(calls)],
            )  # fmt: skip
        elif role in ("tool", "function"):
            id = str(message.get("tool_call_id") or builder.last_call)
            builder.tool_result(id, content or "", place, message.get("name"))
        else:
            raise InputError(
                f"{place} has the role {quoted(role, 40)}; known are system, developer, user, "
                f"assistant and tool"
            )
    return builder.made


def _refusal(message: Mapping[str, Any]) -> str | None:
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else None


def _openai_call(builder: Builder, call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InputError(f"{place} must be an object with a function")
    name = function.get("name")
    id = str(call.get("id") or "call_0")
    name = name if isinstance(name, str) else ""
    return builder.call(id, name, function.get("arguments"), place)


def text_of(content: Any, place: str) -> str | None:
    """The text of a content: a string, None, or parts of text; else one clear line."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InputError(f"the content of {place} must be text or a list of parts")
    return "\n".join(part_text(part, place) for part in content)


def part_text(part: Any, place: str) -> str:
    """The text of one part."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        raise UnsupportedError(
            f"{place} has a part of type {quoted(str(kind), 40)}: this server reads text only"
        )
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{place} has a text part without text")
    return text


def openai_tools(tools: Iterable[Any] | None) -> list[ToolSpec]:
    """Tools of /v1/chat/completions and of /v1/responses (where ``function`` is left out)."""
    found: list[ToolSpec] = []
    for i, tool in enumerate(tools or ()):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise UnsupportedError(
                f"tool {i} has the type {quoted(str(kind), 40)}; only functions can be called here"
            )
        function = tool.get("function", tool)
        found.append(tool_of(function, "parameters", f"tool {i}"))
    return unique(found)


def tool_of(function: Any, schema_key: str, place: str) -> ToolSpec:
    """One tool; InputError naming ``place``."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or any(c.isspace() or c in "<>" for c in name):
        raise InputError(f"{place} must have a name without white space or angle brackets")
    parameters = function.get(schema_key)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InputError(f"{schema_key} of {place} ({name}) must be a JSON schema")
    description = function.get("description")
    return ToolSpec(
        name,
        description if isinstance(description, str) else "",
        dict(parameters) if parameters else {"type": "object", "properties": {}},
        bool(function.get("strict")),
    )


def unique(tools: list[ToolSpec]) -> list[ToolSpec]:
    """The tools; InputError when a name comes twice."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InputError(f"the tool {tool.name} is given twice")
        seen.add(tool.name)
    return tools


def template_tools(tools: Sequence[ToolSpec], choice: ToolChoice) -> list[dict[str, Any]] | None:
    """Tools as templates take them; none when none may be called."""
    if not tools or choice.mode == "none":
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]


def openai_tool_choice(
    choice: Any, tools: Sequence[ToolSpec], parallel: bool | None = None
) -> ToolChoice:
    """tool_choice of the OpenAI APIs."""
    several = parallel is not False
    if choice is None or choice == "auto":
        return ToolChoice("auto", None, several)
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return require_tools(ToolChoice("required", None, several), tools)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        return require_tools(ToolChoice("required", str(name), False), tools)
    raise InputError(
        f"tool_choice is {quoted(json.dumps(choice, default=str), 60)}; known are auto, none, "
        f"required and a function's name"
    )


def require_tools(choice: ToolChoice, tools: Sequence[ToolSpec]) -> ToolChoice:
    """The choice, if there is a tool that it can choose."""
    names = [tool.name for tool in tools]
    if not names:
        raise InputError("tool_choice asks for a call but no tools are given")
    if choice.only is not None and choice.only not in names:
        raise InputError(
            f"tool_choice names {quoted(choice.only, 60)}, which is not among the tools: "
            f"{', '.join(names)}"
        )
    return choice
