"""Responses that notice when the client has left: streamed events, and answers given at once.

A client that leaves is known within a moment, not at the next write; what was started for it is
cancelled. A client that reads slowly holds up its own stream and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from strata.serve.guard import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work; ClientGone, and the work cancelled, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await gone
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from an iterator of encoded pieces. The iterator is closed when the
    client leaves."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        self._pieces = pieces
        self.status_code = 200
        self.background = None
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers({**headers, **fixed})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not writer.done():
                writer.cancel()
            # leaving also shows as an error of the write; either way it is no fault of ours
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await writer

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            close = getattr(self._pieces, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b""})


async def respond(
    request: Request,
    pieces: AsyncIterator[bytes] | None,
    whole: Callable[[], Coroutine[Any, Any, Any]],
    cancel: Callable[[], None],
    headers: dict[str, str],
) -> Response:
    """Events where there are pieces, else the whole answer as JSON, cancelled when the client
    leaves."""
    if pieces is not None:
        return EventStream(pieces, headers)
    try:
        return JSONResponse(await unless_gone(request, whole()), headers=headers)
    finally:
        cancel()
