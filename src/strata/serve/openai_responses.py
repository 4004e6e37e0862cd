"""POST /v1/responses. Nothing is stored: ``store`` and ``previous_response_id`` are refused or
named."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from strata.core.errors import InputError
from strata.serve.blocks import Block, Blocks
from strata.serve.bodies import Body, Count, Effort, Sampled, leftovers
from strata.serve.chat import ChatRequest, chat_ask
from strata.serve.errors import ApiError, bad_request
from strata.serve.forms import response_form
from strata.serve.generation import Generation, Piece
from strata.serve.openai_common import Said, Told, extra
from strata.serve.server import Server
from strata.serve.streams import respond
from strata.serve.text.json_pieces import is_whole
from strata.serve.text.prompt import openai_tool_choice, openai_tools
from strata.serve.text.prompt_other import responses_messages

HARMLESS: dict[str, Any] = {
    "user": (None,), "metadata": (None, {}), "store": (None, False), "service_tier": (None, "auto"),
    "safety_identifier": (None,), "prompt_cache_key": (None,), "prompt_cache_retention": (None,),
    "include": (None, []), "max_tool_calls": (None,), "truncation": (None, "disabled"),
    "stream_options": (None, {}),
}  # fmt: skip
REFUSED = {
    "previous_response_id": (None,), "conversation": (None,), "background": (None, False),
    "prompt": (None,), "top_logprobs": (None, 0),
}  # fmt: skip


class Reasoning(Body):
    """How much thinking."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Sampled):
    """A request."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: dict[str, Any] | None = None


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        server.require_ready()
        server.require_model(body.model)
        generation = server.begin(await chat_ask(server, _read(server, body)))
        answer = ResponsesAnswer(server, generation, body)
        return await respond(request, generation, answer, stream=bool(body.stream))

    return routes


def _read(server: Server, body: ResponsesBody) -> ChatRequest:
    form = dict(body.text or {})
    warnings = leftovers(body, HARMLESS, REFUSED)
    if form.pop("verbosity", None) not in (None, "medium"):
        warnings.append("text.verbosity has no effect here")
    wanted = form.pop("format", None)
    warnings += [f"text.{name} is not known here and has no effect" for name in form]
    try:
        tools = openai_tools(body.tools)
        return ChatRequest(
            kind="responses",
            conversation=responses_messages(body.instructions, body.input, server.text.style),
            sampling={**body.sampling(), "max_tokens": body.max_output_tokens},
            tools=tools,
            choice=openai_tool_choice(body.tool_choice, tools, body.parallel_tool_calls),
            effort=body.reasoning.effort if body.reasoning else None,
            form=response_form(wanted, "text.format"),
            form_field="text.format",
            warnings=warnings,
        )
    except InputError as error:
        raise bad_request(error) from None


class ResponsesAnswer(Told):
    """Turns pieces into events or into one response."""

    def __init__(self, server: Server, generation: Generation, body: ResponsesBody) -> None:
        self.said = Said(server, generation, f"resp_{uuid.uuid4().hex}")
        self._generation = generation
        self._body = body
        self._model = server.text.name
        self._blocks = Blocks()
        self._finish = ""
        self._ids: dict[int, str] = {}
        self._sequence = 0

    def opening(self) -> bytes:
        """The response as it begins, twice, as the API has it."""
        return b"".join(
            self._event(kind, response=self._response("in_progress"))
            for kind in ("response.created", "response.in_progress")
        )

    def add(self, piece: Piece) -> bytes:
        """Events of a piece."""
        self._finish = piece.finish
        steps = list(self._blocks.add(piece.deltas))
        if piece.finish:
            steps += self._blocks.close()
        out = b"".join([self._step(step, block, text) for step, block, text in steps])
        if piece.finish:
            out += self._final(piece.finish)
        return out if out or piece.error else f": {piece.where}\n\n".encode()

    def closing(self) -> bytes:
        """The last event was the end."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        failed = self._response("failed")
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    async def whole(self) -> dict[str, Any]:
        """The response at once."""

        def add(piece: Piece) -> None:
            list(self._blocks.add(piece.deltas))
            self._finish = piece.finish

        await self._generation.each(add)
        return self._ended(self._finish)

    def _final(self, finish: str) -> bytes:
        response = self._ended(finish)
        return self._event(f"response.{response['status']}", response=response)

    def _ended(self, finish: str) -> dict[str, Any]:
        response = self._response("incomplete" if finish == "length" else "completed")
        if finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self._generation.usage
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.reused_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return {**response, **extra(self._generation)}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        done = status in ("completed", "incomplete")
        return {
            "id": self.said.id,
            "object": "response",
            "created_at": self._generation.created,
            "status": status,
            "model": self._model,
            "output": [self._item(block, self._status(block)) for block in self._blocks.all]
            if done
            else [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._generation.ask.sampling.get("temperature"),
            "top_p": self._generation.ask.sampling.get("top_p"),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "metadata": {},
            "usage": None,
        }

    def _status(self, block: Block) -> str:
        """Of a block that has ended: the last one of an answer that was cut is incomplete, unless
        it is a call whose arguments are whole."""
        cut = self._finish == "length" and block is self._blocks.all[-1]
        whole = block.kind == "call" and is_whole(block.text)
        return "incomplete" if cut and not whole else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """An item of the output."""
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        id = self._ids.setdefault(block.index, f"{prefix}_{uuid.uuid4().hex}")
        if block.kind == "call":
            return {
                "type": "function_call", "id": id, "call_id": block.id, "name": block.name,
                "arguments": block.text, "status": status,
            }  # fmt: skip
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {"type": "reasoning", "id": id, "summary": [], "content": content}
        text = [_part(block.text)] if status != "in_progress" else []
        return {
            "type": "message", "id": id, "role": "assistant", "status": status, "content": text,
        }  # fmt: skip

    def _step(self, step: str, block: Block, text: str) -> bytes:
        place = {"output_index": block.index}
        item = {**place, "item_id": self._item(block, "in_progress")["id"]}
        part = {**item, "content_index": 0}
        names = {"text": "output_text", "reasoning": "reasoning_text"}
        if step == "start":
            empty = Block(block.index, block.kind, block.id, block.name)
            added = self._item(empty, "in_progress")
            out = self._event("response.output_item.added", **place, item=added)
            if block.kind == "text":
                out += self._event("response.content_part.added", **part, part=_part(""))
            return out
        if step == "delta":
            if block.kind == "call":
                kind = "response.function_call_arguments.delta"
                return self._event(kind, **item, delta=text)
            extra_fields: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            return self._event(
                f"response.{names[block.kind]}.delta", **part, delta=text, **extra_fields
            )
        out = b""
        if block.kind == "call":
            kind = "response.function_call_arguments.done"
            out += self._event(kind, **item, arguments=block.text, name=block.name)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            kind = f"response.{names[block.kind]}.done"
            out += self._event(kind, **part, text=block.text, **more)
        if block.kind == "text":
            out += self._event("response.content_part.done", **part, part=_part(block.text))
        done = self._item(block, self._status(block))
        return out + self._event("response.output_item.done", **place, item=done)

    def _event(self, kind: str, **more: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
