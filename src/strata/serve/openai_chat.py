"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from strata.core.errors import InputError
from strata.serve.bodies import (
    MAX_N,
    Count,
    Effort,
    Sampled,
    Stops,
    StreamOptions,
    biases,
    leftovers,
)
from strata.serve.chat import ChatRequest, chat_ask
from strata.serve.errors import ApiError, bad_request
from strata.serve.forms import asked_form
from strata.serve.generation import Generation, Piece
from strata.serve.openai_common import Said, Told, extra, quoted, sse, usage_of
from strata.serve.server import Server
from strata.serve.streams import respond
from strata.serve.text.deltas import ContentText, Delta, ReasoningText, ToolCallStart
from strata.serve.text.prompt import openai_messages, openai_tool_choice, openai_tools

HARMLESS: dict[str, Any] = {
    "user": (None,), "metadata": (None, {}), "store": (None, False), "service_tier": (None, "auto"),
    "safety_identifier": (None,), "prompt_cache_key": (None,), "prompt_cache_retention": (None,),
    "verbosity": (None, "medium"),
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "audio": (None,), "modalities": (None, ["text"]), "prediction": (None,),
    "web_search_options": (None,), "functions": (None, []), "function_call": (None, "none"),
    "use_beam_search": (None, False), "best_of": (None, 1),
}  # fmt: skip


class ChatBody(Sampled):
    """A chat request."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    stop: Stops = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        server.require_ready()
        server.require_model(body.model)
        ask = await chat_ask(server, _read(server, body))
        generation = server.begin(ask)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        answer = ChatAnswer(server, generation, with_usage)
        return await respond(request, generation, answer, stream=bool(body.stream))

    return routes


def _read(server: Server, body: ChatBody) -> ChatRequest:
    warnings = leftovers(body, HARMLESS, REFUSED)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(
            400, "top_logprobs needs logprobs: true", "invalid_request", field="top_logprobs"
        )
    if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ; give one", "invalid_request",
            field="max_tokens",
        )  # fmt: skip
    form, form_field = asked_form(body, body.response_format, body.structured_outputs)
    try:
        tools = openai_tools(body.tools)
        return ChatRequest(
            kind="chat",
            conversation=openai_messages(body.messages, server.text.style),
            sampling={
                **body.sampling(),
                "stop": body.stop or None,
                "max_tokens": body.max_completion_tokens or body.max_tokens,
                "logit_bias": biases(body.logit_bias),
            },
            tools=tools,
            choice=openai_tool_choice(body.tool_choice, tools, body.parallel_tool_calls),
            effort=body.reasoning_effort,
            variables=body.chat_template_kwargs or {},
            form=form,
            form_field=form_field,
            n=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
            warnings=warnings,
            reasoning=body.include_reasoning is not False,
            go_on=_go_on(body),
        )
    except InputError as error:
        raise bad_request(error) from None


def _go_on(body: ChatBody) -> bool | None:
    """Whether the answer goes on from the last message; None when that is not said."""
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise ApiError(
            400, "add_generation_prompt false is supported only with continue_final_message",
            "unsupported_field", field="add_generation_prompt",
        )  # fmt: skip
    return body.continue_final_message


class ChatAnswer(Told):
    """Turns pieces into chunks or into one message."""

    def __init__(self, server: Server, generation: Generation, with_usage: bool) -> None:
        self.said = Said(server, generation, f"chatcmpl-{uuid.uuid4().hex}")
        self._generation = generation
        self._logprobs = generation.ask.logprobs >= 0
        self._with_usage = with_usage
        self._fixed = self.said.fixed("chat.completion.chunk")[:-1]
        self._begun: set[int] = set()

    def add(self, piece: Piece) -> bytes:
        """Chunks of a piece."""
        out, index = self._chunks(piece), piece.index
        if index not in self._begun:
            self._begun.add(index)
            out = self._chunk(index, '{"role":"assistant","content":""}') + out
        if piece.finish:
            more = self.said.tail(last=not self._with_usage)
            out += self._chunk(index, "{}", f'"{piece.finish}"', more)
        elif piece.where and not piece.tokens:
            out += f": {piece.where}\n\n"
        return out.encode()

    def closing(self) -> bytes:
        """Usage, when it is asked for, and the end mark."""
        return self.said.closing(self._fixed, self._with_usage)

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        self._with_usage = False
        return sse(json.dumps(error.openai()))

    def _chunks(self, piece: Piece) -> str:
        """The deltas of a piece; with log-probabilities they go out together, in one chunk."""
        index = piece.index
        if not self._logprobs:
            return "".join([self._chunk(index, _delta(delta)) for delta in piece.deltas])
        if not piece.tokens and not piece.deltas:
            return ""
        logprobs = json.dumps({"content": self.said.logprobs(piece.tokens), "refusal": None})
        texts = [delta for delta in piece.deltas if isinstance(delta, ContentText)]
        first = "".join(delta.text for delta in texts)
        out = self._chunk(index, _delta(ContentText(first)), logprobs=logprobs)
        rest = [delta for delta in piece.deltas if not isinstance(delta, ContentText)]
        return out + "".join(self._chunk(index, _delta(d)) for d in rest)

    def _chunk(
        self, index: int, delta: str, reason: str = "null", more: str = "", logprobs: str = "null"
    ) -> str:
        return (
            f'data: {self._fixed},"choices":[{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{more}}}\n\n'
        )

    async def whole(self) -> dict[str, Any]:
        """The response at once."""
        messages = [Message() for _ in range(self._generation.ask.n)]
        await self._generation.each(lambda piece: messages[piece.index].add(piece))
        choices = [
            {
                "index": i,
                "message": message.body(),
                "logprobs": {"content": self.said.logprobs(message.tokens), "refusal": None}
                if self._logprobs
                else None,
                "finish_reason": message.finish,
            }
            for i, message in enumerate(messages)
        ]
        return {
            **self.said.head("chat.completion"),
            "choices": choices,
            "usage": usage_of(self._generation.usage),
            **extra(self._generation),
        }


class Message:
    """One answer, gathered."""

    def __init__(self) -> None:
        self.content, self.reasoning, self.finish = "", "", ""
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[list[Any]] = []

    def add(self, piece: Piece) -> None:
        """What became known."""
        self.tokens += piece.tokens
        self.finish = piece.finish or self.finish
        for delta in piece.deltas:
            if isinstance(delta, ContentText):
                self.content += delta.text
            elif isinstance(delta, ReasoningText):
                self.reasoning += delta.text
            elif isinstance(delta, ToolCallStart):
                function = {"name": delta.name, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.index]["function"]["arguments"] += delta.text

    def body(self) -> dict[str, Any]:
        """As the API has it."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content if self.content or not self.calls else None,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _delta(delta: Delta) -> str:
    if isinstance(delta, ContentText):
        return f'{{"content":{quoted(delta.text)}}}'
    if isinstance(delta, ReasoningText):
        return f'{{"reasoning_content":{quoted(delta.text)}}}'
    if isinstance(delta, ToolCallStart):
        call: dict[str, Any] = {
            "index": delta.index,
            "id": delta.id,
            "type": "function",
            "function": {"name": delta.name, "arguments": ""},
        }
    else:
        call = {"index": delta.index, "function": {"arguments": delta.text}}
    return json.dumps({"tool_calls": [call]}, ensure_ascii=False)
