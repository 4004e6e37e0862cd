"""Responses that notice when the client has left: streamed events, and answers given at once.

A client that leaves is known within a moment, not at the next write; what was started for it is
cancelled. A client that reads slowly holds up its own stream and nothing else.

A stream is written in the very call that brings the engine's tokens: waking a task for each of them
would cost more than all the rest. Only a client that does not read needs a task, for its one write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from strata.serve.errors import ApiError
from strata.serve.generation import Generation, Piece
from strata.serve.guard import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


class Answer(Protocol):
    """An answer in the form of one API: its stream in pieces, or the whole."""

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""

    def opening(self) -> bytes:
        """Before anything is known of the answer."""

    def add(self, piece: Piece) -> bytes:
        """What became known, as events; maybe none."""

    def closing(self) -> bytes:
        """After everything."""

    def failed(self, error: ApiError) -> bytes:
        """In place of the rest."""

    async def whole(self) -> Any:
        """The body of the response at once."""


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
    """Server-sent events of an answer. The generation is cancelled when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self.status_code = 200
        self.background = None
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers({**answer.headers, **fixed})
        self._generation = generation
        self._answer = answer
        self._send: Send
        self._over: asyncio.Future[None]
        self._stuck: asyncio.Future[None] | None = None
        self._written = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._send = send
        self._over = asyncio.get_running_loop().create_future()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            opening = self._answer.opening()
            if opening:
                self._write(opening, more=True)
            self._generation.watch(self._look)
            self._look()
            if not self._over.done():
                gone = asyncio.ensure_future(_gone(receive))
                gone.add_done_callback(self._end)
                try:
                    await self._over
                finally:
                    gone.cancel()
        except OSError:
            pass  # leaving also shows as an error of the write; it is no fault of ours
        finally:
            self._generation.cancel()
            if self._stuck is not None:
                self._stuck.cancel()

    def _look(self) -> None:
        """There may be something to write; while a write waits for the reader, later."""
        if self._stuck is not None or self._written or self._over.done():
            return
        try:
            out, answer, generation = b"", self._answer, self._generation
            for piece in generation.pieces():
                out += answer.add(piece)
                if piece.error is not None:
                    out += answer.failed(piece.error)
            if generation.over:
                self._written = True
                self._write(out + answer.closing(), more=False)
            elif out:
                self._write(out, more=True)
        except Exception as error:  # the one who brought the tokens must not suffer for it
            self._over.set_exception(error)

    def _write(self, data: bytes, *, more: bool) -> None:
        sending = self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._stuck = _at_once(sending)
        if self._stuck is not None:
            self._stuck.add_done_callback(self._unstuck)
        elif not more:
            self._end(None)

    def _unstuck(self, write: asyncio.Future[None]) -> None:
        self._stuck = None
        if write.cancelled() or self._over.done():
            return
        error = write.exception()
        if error is not None:
            self._over.set_exception(error)
        elif self._written:
            self._end(None)
        else:
            self._look()

    def _end(self, _: object) -> None:
        if not self._over.done():
            self._over.set_result(None)


def _at_once(work: Any) -> asyncio.Future[None] | None:
    """Run a coroutine as far as it goes without waiting; a task for the rest, None without one."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return asyncio.ensure_future(_rest(_Rest(work, waits_for)))


async def _rest(rest: _Rest) -> None:
    await rest


class _Rest:
    """A coroutine that somebody else has begun, to be awaited. waits_for: what it waits for."""

    def __init__(self, work: Generator[Any, Any, None], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            go_on: Callable[[Any], Any] = self._work.send
            value: Any
            try:
                value = yield waits_for
            except BaseException as error:  # a cancelled task, above all
                go_on, value = self._work.throw, error
            try:
                waits_for = go_on(value)
            except StopIteration:
                return


async def respond(
    request: Request, generation: Generation, answer: Answer, *, stream: bool
) -> Response:
    """Events, or the whole answer as JSON, cancelled when the client leaves."""
    if stream:
        return EventStream(generation, answer)
    try:
        return JSONResponse(await unless_gone(request, answer.whole()), headers=answer.headers)
    finally:
        generation.cancel()
