"""The HTTP application: routes, errors, and the door around it all. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from strata import __version__
from strata.serve import (
    anthropic,
    misc_routes,
    openai_chat,
    openai_completions,
    openai_responses,
    token_routes,
)
from strata.serve.dialects import given_name
from strata.serve.errors import ApiError
from strata.serve.guard import App, Guard
from strata.serve.posts import Posts
from strata.serve.server import Server
from strata.serve.streams import ClientGone

CLIENT_GONE = 499
"""Nobody reads it; the access log of a proxy does."""


def make_app(server: Server) -> App:
    """The application for a server that is not started yet; its lifespan starts and stops it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        yield
        await server.stop()

    app = FastAPI(
        title="Strata", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for module in (
        openai_chat,
        openai_completions,
        openai_responses,
        anthropic,
        token_routes,
        misc_routes,
    ):
        # without prefixes the routes themselves do: one flat list, quick to search
        app.router.routes.extend(module.router(server).routes)
    handlers: dict[Any, Any] = {
        ApiError: _api_error,
        RequestValidationError: _invalid_body,
        HTTPException: _no_route,
        ClientGone: _gone,
        Exception: _fault,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    guard = Guard(Posts(app, app.routes, handlers), server.settings)
    guard.routes = app.routes  # type: ignore[attr-defined]
    return guard


async def _api_error(request: Request, error: Any) -> Response:
    return JSONResponse(error.body(request.url.path), error.status, headers=error.headers)


async def _invalid_body(request: Request, error: Any) -> Response:
    """Where the body is wrong and how, in the manner of the route."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        what = f"the body is no JSON: {reason} at character {first['loc'][-1]}"
        return await _api_error(request, ApiError(400, what, "invalid_json"))
    if isinstance(error.body, bytes):
        what = "the body must be JSON, sent with Content-Type: application/json"
        return await _api_error(request, ApiError(400, what, "invalid_content_type"))
    place = _place(first, error.body)
    # a field of several types has one problem for each
    words = dict.fromkeys(p["msg"] for p in problems if _place(p, error.body) == place)
    what = f"{place or 'the body'}: {' or: '.join(words)}"
    known = ApiError(400, what, "invalid_request", field=place or None)
    return await _api_error(request, known)


def _place(problem: Any, body: Any) -> str:
    """Where a problem is, in the client's own names; without the names of types."""
    steps: list[str] = []
    for step in problem["loc"][1:]:
        if not steps and problem["loc"][0] == "body":
            step = given_name(str(step), body)
        in_list = isinstance(body, list) and isinstance(step, int)
        known = step in body if isinstance(body, dict) else in_list
        lacks = isinstance(body, dict) and problem["type"] == "missing"
        if not (known or lacks or problem["loc"][0] != "body"):
            continue
        steps.append(str(step))
        inside = isinstance(body, dict) or (isinstance(step, int) and step < len(body or ()))
        body = (body.get(step) if isinstance(body, dict) else body[step]) if inside else None
    return ".".join(steps)


async def _no_route(request: Request, error: Any) -> Response:
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    known = ApiError(error.status_code, str(error.detail), codes.get(error.status_code, "error"))
    headers = {**(error.headers or {}), **known.headers}
    return JSONResponse(known.body(request.url.path), known.status, headers=headers)


async def _gone(request: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _fault(request: Request, error: Any) -> Response:
    """A fault of ours: logged with its trace, told without."""
    logging.getLogger("strata").error("fault in %s", request.url.path, exc_info=error)
    known = ApiError(500, "the server failed on this request; its log says how", "internal_error")
    return await _api_error(request, known)
