"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from strata.core.errors import InputError
from strata.serve.blocks import Block, Blocks
from strata.serve.bodies import Body, Count, Overlap, leftovers
from strata.serve.chat import ChatRequest, chat_ask
from strata.serve.errors import ApiError, bad_request
from strata.serve.forms import response_form
from strata.serve.generation import Generation, Piece, Usage
from strata.serve.openai_common import Said, Told, extra, warned
from strata.serve.server import Server
from strata.serve.streams import respond
from strata.serve.text.json_pieces import cut_object
from strata.serve.text.prompt_other import (
    anthropic_messages,
    anthropic_tool_choice,
    anthropic_tools,
)
from strata.serve.text.specs import ConstraintSpec
from strata.serve.text.template_style import Effort

HARMLESS: dict[str, Any] = {
    "metadata": (None, {}), "service_tier": (None, "auto", "standard_only"),
    "betas": (None, []), "cache_control": (None,), "context_management": (None, {}),
    "inference_geo": (None,),
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "container": (None,),
    "mcp_servers": (None, []),
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountBody(Body):
    """What decides how many tokens a prompt has."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """A request."""

    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    overlap: Overlap | None = None


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        server.require_ready()
        server.require_model(body.model)
        chat = _read(server, body)
        chat.sampling = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "max_tokens": body.max_tokens,
            "overlap": body.overlap,
        }
        generation = server.begin(await chat_ask(server, chat))
        answer = MessagesAnswer(server, generation)
        return await respond(request, generation, answer, stream=bool(body.stream))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> Response:
        server.require_ready()
        server.require_model(body.model)
        ask = await chat_ask(server, _read(server, body))
        return JSONResponse({"input_tokens": len(ask.prompts[0])}, headers=warned(ask.warnings))

    return routes


def _read(server: Server, body: CountBody) -> ChatRequest:
    warnings = leftovers(body, HARMLESS, REFUSED)
    form, form_field = _form(body)
    try:
        tools = anthropic_tools(body.tools)
        return ChatRequest(
            kind="messages",
            conversation=anthropic_messages(body.system, body.messages, server.text.style),
            sampling={},
            tools=tools,
            choice=anthropic_tool_choice(body.tool_choice, tools),
            effort=_effort(body, warnings),
            form=form,
            form_field=form_field,
            warnings=warnings,
        )
    except InputError as error:
        raise bad_request(error) from None


def _form(body: CountBody) -> tuple[ConstraintSpec | None, str]:
    """(constraint or None, the field that asks for it) of output_config.format, or of its name in
    the beta, output_format."""
    newer = (body.output_config or {}).get("format")
    if newer is not None and body.output_format is not None:
        raise ApiError(400, "output_config.format and output_format differ; give one",
                       "invalid_request", field="output_format")  # fmt: skip
    name = "output_format" if newer is None else "output_config.format"
    return response_form(body.output_format if newer is None else newer, name), name


def _effort(body: CountBody, warnings: list[str]) -> Effort | None:
    """thinking and output_config.effort as an effort; a budget of tokens as the nearest one."""
    config = dict(body.output_config or {})
    asked = config.pop("effort", None)
    config.pop("format", None)
    warnings += [f"output_config.{name} is not known here and has no effect" for name in config]
    thinking: Mapping[str, Any] = body.thinking or {}
    kind = thinking.get("type")
    if kind == "disabled":
        return "none"
    if asked is not None:
        levels: dict[Any, Effort] = {
            "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh",
        }  # fmt: skip
        if asked not in levels:
            raise ApiError(400, f"output_config.effort must be one of {', '.join(levels)}",
                           "invalid_request")  # fmt: skip
        return levels[asked]
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise ApiError(400, "thinking.budget_tokens must be a whole number", "invalid_request")
        warnings.append("thinking.budget_tokens is taken as an effort, not as a limit")
        return "low" if budget <= 4096 else "medium" if budget <= 16384 else "high"
    if kind not in (None, "adaptive"):
        raise ApiError(400, "thinking.type must be enabled, adaptive or disabled",
                       "invalid_request")  # fmt: skip
    return None


class MessagesAnswer(Told):
    """Turns pieces into events or into one message."""

    def __init__(self, server: Server, generation: Generation) -> None:
        self.said = Said(server, generation, f"msg_{uuid.uuid4().hex}")
        self._generation = generation
        self._model = server.text.name
        self._blocks = Blocks()
        self._begun = False

    def add(self, piece: Piece) -> bytes:
        """Events of a piece."""
        out = b""
        if not self._begun:
            self._begun = True
            out = _event("message_start", message=self._message([], None))
        steps = list(self._blocks.add(piece.deltas))
        if piece.finish:
            steps += self._blocks.close()
        out += b"".join([_step(step, block, text) for step, block, text in steps])
        if piece.finish:
            return out + self._final(piece.finish)
        return out if steps or piece.error else out + _event("ping")

    def closing(self) -> bytes:
        """The last event was the end."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return f"event: error\ndata: {json.dumps(error.anthropic())}\n\n".encode()

    async def whole(self) -> dict[str, Any]:
        """The message at once."""
        finish = ""

        def add(piece: Piece) -> None:
            nonlocal finish
            list(self._blocks.add(piece.deltas))
            finish = piece.finish or finish

        await self._generation.each(add)
        content = [_content(block) for block in self._blocks.all]
        message = self._message(content, None)
        return {**message, **self._end(finish), **extra(self._generation)}

    def _final(self, finish: str) -> bytes:
        delta = self._end(finish)
        usage = _usage(self._generation.usage)
        more = extra(self._generation)
        return _event("message_delta", delta=delta, usage=usage, **more) + _event("message_stop")

    def _end(self, finish: str) -> dict[str, str | None]:
        text = self._generation.usage.reports[-1].get("stop_text")
        reason = "stop_sequence" if text is not None and finish == "stop" else _REASONS[finish]
        return {"stop_reason": reason, "stop_sequence": text}

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.said.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": _usage(self._generation.usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.reused_tokens,
        "cache_read_input_tokens": usage.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _content(block: Block) -> dict[str, Any]:
    """A block of the message; of arguments that the answer's end cut, what is complete, as the
    official client makes of a stream; those that are no JSON object are given as text."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = cut_object(block.text or "{}")
    if arguments is None:
        arguments = {"arguments": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _step(step: str, block: Block, text: str) -> bytes:
    if step == "start":
        empty = _content(Block(block.index, block.kind, block.id, block.name))
        return _event("content_block_start", index=block.index, content_block=empty)
    if step == "stop":
        return _event("content_block_stop", index=block.index)
    forms = {
        "text": {"type": "text_delta", "text": text},
        "reasoning": {"type": "thinking_delta", "thinking": text},
        "call": {"type": "input_json_delta", "partial_json": text},
    }
    return _event("content_block_delta", index=block.index, delta=forms[block.kind])


def _event(kind: str, **more: Any) -> bytes:
    data = json.dumps({"type": kind, **more}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()
