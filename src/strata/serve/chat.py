"""Conversations to an Ask: what the three chat APIs have in common once their bodies are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strata.core.log import LOG
from strata.serve.begun import begun_tail, begun_text, refuse_begun
from strata.serve.errors import ApiError
from strata.serve.generation import Ask
from strata.serve.server import Server
from strata.serve.text.parsers import parser_for, with_thinking
from strata.serve.text.prompt import Conversation, ToolChoice, template_tools
from strata.serve.text.specs import ConstraintSpec, ToolSpec
from strata.serve.text.template_style import Effort, effort_variables, effort_warning, unread


@dataclass
class ChatRequest:
    """A chat request in common form. form: the constraint on the answer's content, without its
    reasoning_end; form_field: what asks for it. go_on: see ``begun``."""

    kind: str
    conversation: Conversation
    sampling: dict[str, Any]
    tools: Sequence[ToolSpec] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    effort: Effort | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    form: ConstraintSpec | None = None
    form_field: str = "response_format"
    n: int = 1
    logprobs: int = -1
    warnings: list[str] = field(default_factory=list)
    reasoning: bool = True
    go_on: bool | None = None


async def chat_ask(server: Server, chat: ChatRequest) -> Ask:
    """Render the prompt, check everything; ApiError."""
    text = server.text
    for warning in chat.conversation.warnings:
        LOG.warning("%s: %s", chat.kind, warning)
    variables = server.template_variables(chat.variables)
    chat.warnings += [
        f"chat_template_kwargs.{name} has no effect: this model's template does not read it"
        for name in unread(text.template, variables)
    ]
    if chat.effort is not None:
        limited = effort_warning(text.style, chat.effort)
        chat.warnings += [limited] if limited else []
        variables = {**effort_variables(text.style, chat.effort), **variables}
    tools = chat.tools if chat.choice.mode != "none" else ()
    if tools and unread(text.template, ["tools"]):
        chat.warnings.append("this model's template has no place for tools: it does not see them")
    if not text.style.calls and any(m.get("tool_calls") for m in chat.conversation.messages):
        chat.warnings.append("this model's template does not show the calls of earlier answers")
    begun = begun_text(chat.conversation, chat.go_on)
    refuse_begun(begun, _held_forms(chat))
    if begun is not None and chat.effort not in (None, "none"):
        chat.warnings.append("the answer is begun already: no thinking comes before it")

    def render() -> tuple[list[int], str]:
        contents = (message.get("content") for message in chat.conversation.messages)
        server.require_length((c for c in contents if isinstance(c, str)), chat.kind)
        ids = text.tokens.chat_prompt(
            chat.conversation.messages,
            tools=template_tools(chat.tools, chat.choice),
            continue_final=begun is not None,
            **variables,
        )
        if begun is not None:
            return ids, begun_tail(text.family, text.template, begun)
        return ids, text.tail(ids)

    tokens, tail = await server.apart(render, _n_chars(chat))
    server.require_room(tokens, chat.kind)
    family, template = text.family, text.template
    constraint = _constraint(server, chat, tail)
    if constraint is not None and constraint.kind == "tool_calls":  # every call is held to it
        tools = [replace(tool, strict=True) for tool in tools]
    server.require_constraint(constraint, chat.form_field if chat.form else "tools")
    return Ask(
        kind=chat.kind,
        prompts=[tokens],
        sampling=server.sampling(len(tokens), chat.sampling),
        parser=lambda: parser_for(
            family, template, tools, reasoning=chat.reasoning, prompt_tail=tail
        ),
        n=chat.n,
        continues=begun is not None,
        logprobs=chat.logprobs,
        constraint=constraint,
        warnings=chat.warnings,
    )


def _held_forms(chat: ChatRequest) -> list[str]:
    """Fields that ask for a form of the whole answer."""
    forms = [chat.form_field] if chat.form is not None else []
    return [*forms, "tool_choice"] if chat.choice.mode == "required" else forms


def _n_chars(chat: ChatRequest) -> int:
    """About how much there is to render."""
    texts = [str(message.get("content")) for message in chat.conversation.messages]
    return sum(map(len, texts)) + 500 * len(chat.tools) + 100 * len(texts)


def _constraint(server: Server, chat: ChatRequest, tail: str) -> ConstraintSpec | None:
    """The form of the answer: of the content, or of the calls that must be made."""
    text = server.text
    calls = chat.choice.mode == "required" or (
        chat.choice.mode == "auto" and any(tool.strict for tool in chat.tools)
    )
    if chat.form is not None and chat.tools and chat.choice.mode != "none":
        raise ApiError(
            400,
            "tools and a response format exclude each other here; set tool_choice to none or "
            "leave the format away",
            "invalid_request",
            field=chat.form_field,
        )
    if chat.form is None and not calls:
        return None
    place = (text.family, text.template, tail)
    if chat.form is not None:
        return with_thinking(chat.form, *place)
    value = {
        "tools": [
            {"name": t.name, "parameters": dict(t.parameters), "strict": t.strict}
            for t in chat.tools
        ],
        "required": chat.choice.mode == "required",
        "only": chat.choice.only,
        "parallel": chat.choice.parallel,
        "family": text.family,
        "template_hint": text.template,
    }
    return with_thinking(ConstraintSpec("tool_calls", value), *place)
