"""Requests as the queue sees them: one is decoded, the others wait in order.

Knows no sockets and no HTTP. A job ends exactly once, with an ``End``, whatever happens to the
engine or the client; its slot is free only when the engine has said so or is gone.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.serve.messages import End, Generate, PromptLogprobs, Reading, Tokens

JobEvent = Tokens | Reading | PromptLogprobs | End


class QueueFull(Exception):
    """Too many requests wait; n of them."""

    def __init__(self, n: int) -> None:
        self.n = n
        super().__init__(f"{n} requests are waiting; try again later")


@dataclass(eq=False)
class Job:
    """One request to the engine. Events arrive in order; the last one is an ``End``."""

    request: Generate
    kind: str = ""
    """Route, for status and logs."""
    again: bool = False
    """Whether it is a further answer to a prompt that another job has counted."""
    created: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    read: tuple[int, int] = (0, 0)
    """Prompt tokens read, of those to read."""
    generated: int = 0
    cancelled: float | None = None
    ended: End | None = None
    events: deque[JobEvent] = field(default_factory=deque)
    """Those that nobody has looked at."""
    news: Callable[[], None] | None = None
    """Told when there is an event, and when somebody nudges. It looks at once, in the call of who
    brought the event: a task woken for it would cost as much as all the rest."""

    def push(self, event: JobEvent) -> None:
        """An event of the engine, or of the link in its place."""
        if self.ended is not None:
            return
        if type(event) is Tokens:
            self.last_token = time.monotonic()
            if self.first_token is None:
                self.first_token = self.last_token
            self.generated += len(event.items)
        elif isinstance(event, Reading):
            self.read = (event.done, event.total)
        elif isinstance(event, End):
            self.ended = event
        if self.cancelled is None or isinstance(event, End):
            self.events.append(event)
            self.nudge()

    def nudge(self) -> None:
        """Let the one who listens look, and say where the request stands if there is nothing."""
        if self.news is not None:
            self.news()


class Jobs:
    """The queue. start and cancel are told when the engine must do something, on_end when a job
    is over."""

    def __init__(
        self,
        most: int,
        start: Callable[[Job], None],
        cancel: Callable[[Job], None],
        on_end: Callable[[Job, End], None] = lambda job, end: None,
    ) -> None:
        self.running: Job | None = None
        self.waiting: deque[Job] = deque()
        self._most = most
        self._start = start
        self._cancel = cancel
        self.on_end = on_end
        self._ids = itertools.count(1)
        self._open = False

    def new_id(self) -> int:
        """A number no other request has."""
        return next(self._ids)

    def add(self, job: Job) -> None:
        """Queue a job; QueueFull."""
        if len(self.waiting) >= self._most:
            raise QueueFull(len(self.waiting))
        self.waiting.append(job)
        self._next()

    def position(self, job: Job) -> int:
        """0 while it is decoded, else its place in the queue, from 1; -1 when it is over."""
        if job is self.running:
            return 0
        return self.waiting.index(job) + 1 if job in self.waiting else -1

    def cancel(self, job: Job) -> None:
        """The client does not want it any more."""
        if job.ended is not None or job.cancelled is not None:
            return
        job.cancelled = time.monotonic()
        if job is self.running:
            self._cancel(job)
        elif job in self.waiting:
            self.waiting.remove(job)
            self._end(job, End(job.request.id, "cancelled"))

    def open(self) -> None:
        """The engine is ready for work."""
        self._open = True
        self._next()

    def close(self, error: str | None = None) -> Job | None:
        """The engine is gone: the job it had ends with the error; the others wait on."""
        self._open = False
        job, self.running = self.running, None
        if job is not None:
            finish = "cancelled" if job.cancelled is not None else "error"
            self._end(job, End(job.request.id, finish, {}, error or "stopped", "EngineDied"))
        return job

    def nudge(self) -> None:
        """Everybody may say where they stand."""
        for job in (self.running, *self.waiting):
            if job is not None:
                job.nudge()

    def refuse_all(self, error: str) -> None:
        """The server stops: nobody waits any more."""
        self.close(error)
        while self.waiting:
            job = self.waiting.popleft()
            self._end(job, End(job.request.id, "error", {}, error, "Stopping"))

    def event(self, event: JobEvent) -> Job | None:
        """Hand an event of the engine to its job; the job."""
        job = self.running
        if job is None or event.id != job.request.id:
            return None  # of a job that ended when the engine was restarted
        if isinstance(event, End):
            self.running = None
            self._end(job, event)
            self._next()
        else:
            job.push(event)
        return job

    def _end(self, job: Job, end: End) -> None:
        job.push(end)
        self.on_end(job, end)

    def _next(self) -> None:
        if self._open and self.running is None and self.waiting:
            job = self.waiting.popleft()
            self.running = job
            job.started = time.monotonic()
            self._start(job)
