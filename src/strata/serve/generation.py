"""A request in common form, whatever API it came through: asked of the engine, told in pieces.

Knows no JSON bodies. The API modules make an ``Ask`` and turn ``Piece`` objects into their events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from strata.serve.errors import ApiError, engine_error
from strata.serve.jobs import Job, Jobs, QueueFull
from strata.serve.messages import End, Generate, PromptLogprobs, Reading, Tokens
from strata.serve.text.deltas import AnswerParser, ContentText, Delta, ToolCallStart
from strata.serve.text.specs import ConstraintSpec

PACE_S = 0.01
"""A stream is written to at most a hundred times a second; what comes faster goes out together. The
first token never waits."""


class PlainText:
    """Parser of plain completions: everything is content."""

    reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """The text."""
        return [ContentText(text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is held back."""
        return []


@dataclass
class Ask:
    """A request. prompts: token ids; each is answered n times. sampling: request settings by name.
    logprobs, prompt_logprobs: likeliest tokens to tell, -1 for none. parser: made anew for every
    answer. warnings: fields that had no effect, told to the client."""

    kind: str
    prompts: list[list[int]]
    sampling: dict[str, Any]
    parser: Callable[[], AnswerParser] = PlainText
    n: int = 1
    chat: bool = True
    continues: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    constraint: ConstraintSpec | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """What became known at once about one answer. tokens: as in messages.Tokens. where: queue
    position or prompt progress, when there is nothing else to say."""

    index: int
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[list[Any]] = field(default_factory=list)
    prompt: list[list[Any]] = field(default_factory=list)
    finish: str = ""
    where: str = ""


@dataclass
class Usage:
    """Counts of a whole request, and what its answers report."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    reused_tokens: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)

    def add(self, report: dict[str, Any], n_tokens: int, n_reasoning: int, *, first: bool) -> None:
        """One answer ended; first: of its prompt's. A prompt counts once, and so does what was kept
        of it."""
        self.completion_tokens += n_tokens
        self.reasoning_tokens += n_reasoning
        self.reused_tokens += report.get("reused_tokens", 0) if first else 0
        self.reports.append(report)


class Generation:
    """Runs an ask. Iterate ``pieces``; afterwards, or as it goes, ``usage``."""

    def __init__(self, ask: Ask, jobs: Jobs) -> None:
        self.ask = ask
        self.usage = Usage(prompt_tokens=sum(map(len, ask.prompts)))
        self.created = int(time.time())
        self._jobs_queue = jobs
        self._jobs: list[Job] = []

    def submit(self) -> None:
        """Queue it; ApiError when the queue is full."""
        for prompt in self.ask.prompts:
            for i in range(self.ask.n):
                self._jobs.append(self._job(prompt, i))
        try:
            for job in self._jobs:
                self._jobs_queue.add(job)
        except QueueFull as full:
            self.cancel()
            raise ApiError(503, str(full), "queue_full", retry_s=5) from None

    def cancel(self) -> None:
        """Nobody wants what is not there yet."""
        for job in self._jobs:
            self._jobs_queue.cancel(job)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Everything, answer after answer; ApiError when one fails."""
        try:
            for index, job in enumerate(self._jobs):
                async for piece in self._answer(index, job):
                    yield piece
        finally:
            self.cancel()

    async def _answer(self, index: int, job: Job) -> AsyncIterator[Piece]:
        parser = self.ask.parser()
        n_reasoning, called, written = 0, False, 0.0
        loop = asyncio.get_running_loop()
        while True:
            if not await job.wait():
                yield Piece(index, where=self._where(job))
                continue
            early = written + PACE_S - loop.time()
            if early > 0:
                await asyncio.sleep(early)
            piece, end = Piece(index), None
            for event in job.take():
                if isinstance(event, Tokens):
                    for item in event.items:
                        before = parser.reasoning
                        piece.deltas += parser.feed(item[1])
                        n_reasoning += before or parser.reasoning
                    piece.tokens += event.items
                elif isinstance(event, PromptLogprobs):
                    piece.prompt += event.items
                elif isinstance(event, Reading):
                    piece.where = self._where(job)
                else:
                    end = event
            if end is not None:
                piece.deltas += parser.finish()
            if not called:
                called = any(type(delta) is ToolCallStart for delta in piece.deltas)
            if end is not None:
                report = {**end.report, **_times(job)}
                first = index % self.ask.n == 0
                self.usage.add(report, job.generated, n_reasoning, first=first)
                piece.finish = _finish(end, called)
            yield piece
            if end is not None:
                return
            if piece.tokens:
                written = loop.time()

    def _job(self, prompt: list[int], i: int) -> Job:
        ask, sampling = self.ask, self.ask.sampling
        if i and sampling.get("seed", -1) != -1:
            sampling = {**sampling, "seed": (sampling["seed"] + i) % 2**64}
        request = Generate(
            id=self._jobs_queue.new_id(),
            tokens=prompt,
            sampling=sampling,
            chat=ask.chat,
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
            constraint=ask.constraint.as_json() if ask.constraint else None,
            continues=ask.continues,
        )
        return Job(request, ask.kind, again=i > 0)

    def _where(self, job: Job) -> str:
        position = self._jobs_queue.position(job)
        if position:
            return f"waiting, position {position}"
        done, total = job.read
        return f"prompt {done}/{total}" if job.first_token is None else "writing"


def _finish(end: End, called: bool) -> str:
    """Why the answer ended; ApiError for what is no end of an answer."""
    if end.finish in ("stop", "length"):
        return "tool_calls" if called and end.finish == "stop" else end.finish
    if end.finish == "cancelled":
        raise ApiError(503, "the request was cancelled", "cancelled", retry_s=1)
    raise engine_error(end)


def _times(job: Job) -> dict[str, float]:
    started = job.started or job.created
    first = job.first_token or time.monotonic()
    return {"queue_s": started - job.created, "first_token_s": first - job.created}
