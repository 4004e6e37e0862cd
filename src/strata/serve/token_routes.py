"""POST /tokenize and /detokenize, in the forms of vLLM (prompt or messages) and of llama.cpp
(content)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from strata.core.errors import InputError
from strata.serve.begun import begun_text
from strata.serve.bodies import Body, leftovers
from strata.serve.errors import ApiError, bad_request
from strata.serve.openai_common import warned
from strata.serve.server import Server
from strata.serve.text.prompt import ToolChoice, openai_messages, openai_tools, template_tools


class TokenizeBody(Body):
    """Text, or messages, to ids. content with add_special and parse_special: llama.cpp's names of
    prompt with add_special_tokens and special, with defaults of its own."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    special: bool | None = False
    parse_special: bool | None = None
    with_pieces: bool | None = False
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """Ids to text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
    skip_special_tokens: bool | None = False


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        server.require_ready()
        server.require_model(body.model)
        warnings = leftovers(body, {}, {})
        given = [body.prompt, body.content, body.messages]
        if given.count(None) != 2:
            raise ApiError(
                400, "give one of prompt, content and messages", "invalid_request", field="prompt"
            )
        n_chars = len(str(body.messages or body.prompt or body.content))
        ids = await server.apart(lambda: _encode(server, body), n_chars)
        out: dict[str, Any] = {
            "tokens": ids, "count": len(ids), "max_model_len": server.context_tokens,
        }  # fmt: skip
        if body.with_pieces or body.return_token_strs:
            pieces = [server.text.tokens.token_bytes(i).decode("utf-8", "replace") for i in ids]
            if body.return_token_strs:
                out["token_strs"] = pieces
            if body.with_pieces and body.content is not None:
                out["tokens"] = [{"id": i, "piece": pieces[n]} for n, i in enumerate(ids)]
            elif body.with_pieces:
                out["pieces"] = pieces
        return _answer(out, warnings)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        server.require_ready()
        server.require_model(body.model)
        warnings = leftovers(body, {}, {})
        server.require_ids(body.tokens, "tokens")
        skip = bool(body.skip_special_tokens)
        text = await server.apart(
            lambda: server.text.tokens.decode(body.tokens, skip), len(body.tokens)
        )
        return _answer({"prompt": text, "content": text}, warnings)

    return routes


def _encode(server: Server, body: TokenizeBody) -> list[int]:
    tokenizer = server.text.tokens
    if body.content is not None:
        bos = None if body.add_special else False
        return tokenizer.encode(body.content, special=body.parse_special is not False, add_bos=bos)
    if body.messages is None:
        bos = None if body.add_special_tokens in (None, True) else False
        return tokenizer.encode(body.prompt or "", special=bool(body.special), add_bos=bos)
    try:
        made = openai_messages(body.messages, server.text.style)
        tools = template_tools(openai_tools(body.tools), ToolChoice())
    except InputError as error:
        raise bad_request(error, "messages") from None
    more = body.add_generation_prompt is not False
    go_on = body.continue_final_message
    begun = begun_text(made, go_on) if more or go_on else None
    variables = server.template_variables(body.chat_template_kwargs)
    return tokenizer.chat_prompt(
        made.messages,
        tools=tools,
        add_generation_prompt=more,
        continue_final=begun is not None,
        **variables,
    )


def _answer(out: dict[str, Any], warnings: list[str]) -> Response:
    return JSONResponse(
        out | ({"warnings": warnings} if warnings else {}), headers=warned(warnings)
    )
