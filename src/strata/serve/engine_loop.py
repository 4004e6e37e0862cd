"""The engine process's life: load, say so, answer one request after the other, stop.

Knows no models: a ``Backend`` does the work (``model_backend``, or ``scripted`` in tests). The main
thread works; the pipe's reading thread answers pings and notes cancellations, so the other side can
tell a busy engine (the pulse moves) from a hung one (it does not), and from a dead one (no pong).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from strata.core.errors import InputError, RequestCancelled, StrataError
from strata.core.log import LOG
from strata.serve.messages import (
    Cancel,
    Counters,
    End,
    Failed,
    Generate,
    Load,
    Message,
    Phase,
    Ping,
    Pong,
    PromptLogprobs,
    Reading,
    Ready,
    Stop,
    Tokens,
)
from strata.serve.pipe import Pipe

ABANDON_AFTER_S = 0.25
"""A cancelled request may end its window in this time; after it the window is broken off."""
PACE_S = 0.03
"""Tokens that come faster wait for each other, at most this long and a layer's work: a stream is
written to some thirty times a second, and a write costs what it costs. The first never waits."""
_EXIT_GRACE_S = 5.0
_PHASE_EVERY_S = 0.1


class Control(Protocol):
    """What a backend tells and asks while it works."""

    def pulse(self) -> None:
        """A step of work is done. RequestCancelled when the request is to be broken off."""

    def cancelled(self) -> bool:
        """Whether the request is cancelled; looked at between windows."""

    def phase(self, phase: str, done: int, total: int) -> None:
        """Progress of loading."""

    def reading(self, done: int, total: int) -> None:
        """Progress of the prompt."""

    def tokens(self, items: list[list[Any]]) -> None:
        """Tokens of the answer (see messages.Tokens)."""

    def prompt_logprobs(self, start: int, items: list[list[Any]]) -> None:
        """Log-probabilities of prompt tokens (see messages.PromptLogprobs)."""


class Backend(Protocol):
    """Loads a model and answers requests, one at a time."""

    def load(self, load: Load, control: Control) -> dict[str, Any]:
        """Load, and generate one token; facts about the model."""
        ...

    def generate(self, request: Generate, control: Control) -> tuple[str, dict[str, Any]]:
        """Answer; (finish, report). StrataError for what fails."""
        ...

    def counters(self) -> dict[str, Any]:
        """Facts for metrics and status."""
        ...

    def idle(self) -> bool:
        """A step of what is done when nobody asks; whether more is left."""
        ...

    def close(self) -> None:
        """Keep what is to be kept, let everything go."""
        ...


class EngineLoop:
    """Runs a backend behind a pipe until it is told to stop."""

    def __init__(self, pipe: Pipe, backend: Backend) -> None:
        self._pipe = pipe
        self._backend = backend
        self._work: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._pulse = 0
        self._current: int | None = None
        self._reading = False
        self._cancelled: dict[int, float] = {}
        self._stopping = False
        self._last_phase = self._flushed = 0.0
        self._held: list[list[Any]] = []
        self._came = 0.0
        self._first_s: float | None = None

    def run(self) -> int:
        """Until told to stop; the exit code."""
        self._pipe.listen(self._receive, self._gone)
        first = self._work.get()
        if not isinstance(first, Load):
            return 0
        try:
            info = self._backend.load(first, self)
        except RequestCancelled:
            return 0
        except Exception as error:  # whatever it is, the other side must know
            self._pipe.send(Failed(_one_line(error), isinstance(error, InputError)))
            return 2
        self._pipe.send(Counters(self._backend.counters()))
        self._pipe.send(Ready(info))
        while isinstance(message := self._work.get(), Generate):
            self._answer(message)
            self._idle()
        self._backend.close()
        return 0

    def _answer(self, request: Generate) -> None:
        self._current, self._reading = request.id, True
        self._came, self._first_s, self._flushed = time.monotonic(), None, 0.0
        end = End(request.id, "cancelled")
        try:
            if not self.cancelled():
                finish, report = self._backend.generate(request, self)
                self._flush(now=True)
                end = End(request.id, finish, {**report, "engine_first_s": self._first_s})
        except RequestCancelled:
            pass
        except StrataError as error:
            end = End(request.id, "error", {}, _one_line(error), type(error).__name__)
        except Exception as error:  # a fault of ours must not end the process
            LOG.exception("request %d failed", request.id)
            end = End(request.id, "error", {}, _one_line(error) or "failed", type(error).__name__)
        self._flush(now=True)
        self._current = None
        self._cancelled.pop(request.id, None)
        self._pipe.send(Counters(self._backend.counters()))
        self._pipe.send(end)

    def _idle(self) -> None:
        """Until there is work: what the backend does when nobody asks, step by step."""
        worked = False
        try:
            while self._work.empty() and self._backend.idle():
                worked = True
        except RequestCancelled:
            return
        if worked:
            self._pipe.send(Counters(self._backend.counters()))

    def pulse(self) -> None:
        """A step of work is done."""
        self._pulse += 1
        if self._held:
            self._flush()
        if self._stopping and self._current is None:
            raise RequestCancelled("the server is stopping")
        if self._cancelled or self._stopping:
            since = self._cancelled.get(self._current or -1)
            patience = 0.0 if self._reading else ABANDON_AFTER_S
            if since is not None and time.monotonic() - since >= patience:
                raise RequestCancelled("the request was cancelled")

    def tick(self) -> None:
        """A step of work is done by one who does not listen (a scripted fault)."""
        self._pulse += 1

    def cancelled(self) -> bool:
        """Whether the running request is cancelled."""
        return self._current in self._cancelled

    def phase(self, phase: str, done: int, total: int) -> None:
        """Progress of loading, a few times a second."""
        self.pulse()
        now = time.monotonic()
        if done >= total or now - self._last_phase >= _PHASE_EVERY_S:
            self._last_phase = now
            self._pipe.send(Phase(phase, done, total))

    def reading(self, done: int, total: int) -> None:
        """Progress of the prompt."""
        self._pipe.send(Reading(self._current or 0, done, total))
        self.pulse()

    def tokens(self, items: list[list[Any]]) -> None:
        """Tokens of the answer. Those of windows that are quicker than PACE_S go together."""
        self._reading = False
        self._pulse += 1
        self._held += items
        self._flush()

    def _flush(self, *, now: bool = False) -> None:
        if self._held and (now or time.monotonic() - self._flushed >= PACE_S):
            self._flushed = time.monotonic()
            if self._first_s is None:
                self._first_s = self._flushed - self._came
            held, self._held = self._held, []
            self._pipe.send(Tokens(self._current or 0, held))

    def prompt_logprobs(self, start: int, items: list[list[Any]]) -> None:
        """Log-probabilities of prompt tokens."""
        self._pipe.send(PromptLogprobs(self._current or 0, start, items))

    def _receive(self, message: Message) -> None:
        """In the reading thread."""
        if isinstance(message, Ping):
            self._pipe.send(Pong(message.n, self._pulse))
        elif isinstance(message, Cancel):
            self._cancelled.setdefault(message.id, time.monotonic())
            if len(self._cancelled) > 1024:  # cancels of requests that were over already
                self._cancelled.pop(next(iter(self._cancelled)))
        else:
            if isinstance(message, Stop):
                self._stop()
            self._work.put(message)

    def _stop(self) -> None:
        self._stopping = True
        if self._current is not None:
            self._cancelled.setdefault(self._current, time.monotonic())

    def _gone(self) -> None:
        """Nobody listens any more: stop, and do not take for ever over it."""
        self._stop()
        self._work.put(Stop())
        exit_later(_EXIT_GRACE_S)


def exit_later(seconds: float, exit: Callable[[int], None] = os._exit) -> None:
    """End the process in any case after so long."""
    timer = threading.Timer(seconds, exit, args=(1,))
    timer.daemon = True
    timer.start()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
