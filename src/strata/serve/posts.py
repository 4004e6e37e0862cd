"""The POST routes, answered without the web framework's layers.

They are declared to the framework, which makes the OpenAPI document of them; answering through it
took a third of a millisecond of the time to the first token. What it would do is done here: find
the route, read the body as JSON, check it against the model, turn errors into answers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from strata.serve.errors import ApiError
from strata.serve.guard import App, Receive, Scope, Send
from strata.serve.streams import ClientGone

Handler = Callable[[Request, Any], Awaitable[Response]]


class Posts:
    """In front of an application. handlers: what an error is answered with, by its class; routes:
    of the application; those that take a ``body`` and POST are answered here."""

    def __init__(
        self, app: App, routes: Iterable[BaseRoute], handlers: Mapping[type[Exception], Handler]
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._posts = {
            route.path: (_caller(route.endpoint), route.endpoint)
            for route in routes
            if isinstance(route, Route) and "POST" in (route.methods or ())
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        known = scope["type"] == "http" and scope["method"] == "POST"
        found = self._posts.get(scope["path"]) if known else None
        if found is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            (model, takes_request), endpoint = found
            body = _checked(model, await _body(request))
            response = await (endpoint(body, request) if takes_request else endpoint(body))
        except Exception as error:
            response = await self._handler(error)(request, error)
        await response(scope, receive, send)

    def _handler(self, error: Exception) -> Handler:
        kinds = (kind for kind in type(error).__mro__ if kind in self._handlers)
        return self._handlers[next(kinds)]


def _caller(endpoint: Callable[..., Any]) -> tuple[type[BaseModel], bool]:
    """The model of an endpoint's body, and whether it also takes the request."""
    parameters = inspect.signature(endpoint, eval_str=True).parameters
    return parameters["body"].annotation, "request" in parameters


async def _body(request: Request) -> Any:
    """The body as JSON; as bytes when it is not said to be JSON. ApiError."""
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if not data:
        return None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        return data
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos}"
    except UnicodeDecodeError as error:
        what = f"it is not {error.encoding.upper()} at byte {error.start}"
    except RecursionError:
        what = "it is nested too deep"
    except ValueError as error:  # a number of thousands of digits
        what = str(error)
    raise ApiError(400, f"the body is no JSON: {what}", "invalid_json")


def _checked(model: type[BaseModel], data: Any) -> BaseModel:
    """The body; RequestValidationError as the framework would raise it."""
    if data is None:
        missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise RequestValidationError([missing], body=None)
    try:
        return model.model_validate(data, from_attributes=True)  # as the framework does
    except ValidationError as error:
        problems = error.errors(include_url=False)
        placed = [{**problem, "loc": ("body", *problem["loc"])} for problem in problems]
        raise RequestValidationError(placed, body=data) from None
