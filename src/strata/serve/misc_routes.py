"""Models, tokens, health, metrics, status, and the web page."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from strata.core.settings import SETTINGS
from strata.serve.bodies import Body, leftovers
from strata.serve.errors import ApiError
from strata.serve.metrics import CONTENT_TYPE
from strata.serve.server import Server
from strata.serve.status import readiness, status
from strata.serve.web import Asset, load_page


class TokenizeBody(Body):
    """Text, or messages, to ids."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    special: bool | None = False
    with_pieces: bool | None = False


class DetokenizeBody(Body):
    """Ids to text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
    skip_special_tokens: bool | None = False


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    for part in (_operation(server), _tokens(server), _page()):
        routes.routes.extend(part.routes)
    return routes


def _operation(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> Response:
        state = readiness(server.link)
        if state["ready"] and not (server.text.tokenizer or server.text.why_not):
            state |= {"ready": False, "phase": "loading", "detail": "reading the tokenizer"}
        if state["ready"]:
            return JSONResponse(state)
        return JSONResponse(state, 503, headers={"Retry-After": "2"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        page = server.metrics.page(server.link.health.counters)
        return Response(page, media_type=CONTENT_TYPE)

    @routes.get("/v1/status")
    async def server_status() -> Response:
        settings = server.settings
        shown = {
            name: info.show(getattr(settings, name))
            for name, info in SETTINGS.items()
            if info.scope == "serve"
        }
        body = status(server.link, server.text.name, shown)
        body["model"]["type"] = server.text.kind
        body["sampling_defaults"] = server.text.sampling
        return JSONResponse(body)

    @routes.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(server)]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        server.require_model(name)
        return JSONResponse(_model(server))

    return routes


def _model(server: Server) -> dict[str, Any]:
    context = server.context_tokens or None
    return {
        "id": server.text.name,
        "object": "model",
        "created": int(server.started),
        "owned_by": "strata",
        "type": server.text.kind,
        "context_length": context,
        "max_model_len": context,
        "family": server.text.family or None,
    }


def _tokens(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        server.require_ready()
        server.require_model(body.model)
        leftovers(body, {}, {})
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "invalid_request")

        def encode() -> list[int]:
            tokenizer = server.text.tokens
            if body.messages is not None:
                more = body.add_generation_prompt is not False
                return tokenizer.chat_prompt(body.messages, add_generation_prompt=more)
            bos = None if body.add_special_tokens in (None, True) else False
            return tokenizer.encode(body.prompt or "", special=bool(body.special), add_bos=bos)

        ids = await server.apart(encode, len(str(body.messages or body.prompt)))
        out: dict[str, Any] = {
            "tokens": ids, "count": len(ids), "max_model_len": server.context_tokens,
        }  # fmt: skip
        if body.with_pieces:
            pieces = [server.text.tokens.token_bytes(i).decode("utf-8", "replace") for i in ids]
            out["pieces"] = pieces
        return JSONResponse(out)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        server.require_ready()
        server.require_model(body.model)
        leftovers(body, {}, {})
        if body.tokens:
            server.require_ids(body.tokens, "tokens")
        skip = bool(body.skip_special_tokens)
        text = await server.apart(
            lambda: server.text.tokens.decode(body.tokens, skip), len(body.tokens)
        )
        return JSONResponse({"prompt": text})

    return routes


def _page() -> APIRouter:
    """The web page's files, each at its own path: nothing of a request becomes a path."""
    routes = APIRouter()

    def add(path: str, asset: Asset) -> None:
        @routes.get(path, include_in_schema=False)
        async def page_file() -> Response:
            return Response(asset.body, headers=dict(asset.headers))

    for path, asset in load_page().items():
        add(path, asset)
    return routes
