"""Models, health, metrics, status, and the web page."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from strata.core.settings import SETTINGS
from strata.serve.metrics import CONTENT_TYPE
from strata.serve.server import Server
from strata.serve.status import readiness, status
from strata.serve.web import Asset, load_page


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    for part in (_operation(server), _page()):
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
        own = {name: info for name, info in SETTINGS.items() if info.scope == "serve"}
        shown = {name: info.show(getattr(settings, name)) for name, info in own.items()}
        body = status(server.link, server.text.name, shown)
        for name, info in own.items():  # the engine does not know them
            body["settings"][name] = {
                "value": shown[name], "source": server.effective.sources[name], "unit": info.unit,
                "changes_output": False,
            }  # fmt: skip
        body["model"] |= {
            "type": server.text.kind,
            "context_tokens": server.planned_context_tokens,
        }
        body["sampling_defaults"] = server.text.sampling
        return JSONResponse(body)

    @routes.get("/v1/models")
    async def models() -> Response:
        await server.text_known()
        return JSONResponse({"object": "list", "data": [_model(server)]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        server.require_model(name)
        await server.text_known()
        return JSONResponse(_model(server))

    return routes


def _model(server: Server) -> dict[str, Any]:
    context = server.planned_context_tokens
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
