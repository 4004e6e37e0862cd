"""A request in common form, whatever API it came through: asked of the engine, told in pieces.

Knows no JSON bodies. The API modules make an ``Ask`` and turn ``Piece`` objects into their events,
in the very call that brings the engine's tokens: no task and no timer stands between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strata.serve.errors import ApiError, engine_error
from strata.serve.jobs import Job, Jobs, QueueFull
from strata.serve.messages import End, Generate, PromptLogprobs, Reading, Tokens
from strata.serve.text.deltas import AnswerParser, ContentText, Delta, ToolCallStart
from strata.serve.text.specs import ConstraintSpec


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
    position or prompt progress, when there is nothing else to say. error: why there will be no more
    of the whole request."""

    index: int
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[list[Any]] = field(default_factory=list)
    prompt: list[list[Any]] = field(default_factory=list)
    finish: str = ""
    where: str = ""
    error: ApiError | None = None

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        said = self.tokens or self.deltas or self.prompt
        return not (said or self.finish or self.where or self.error)


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
    """Runs an ask: ``watch`` it, take ``pieces`` until it is ``over``; then, or as it goes,
    ``usage``."""

    def __init__(self, ask: Ask, jobs: Jobs) -> None:
        self.ask = ask
        self.usage = Usage(prompt_tokens=sum(map(len, ask.prompts)))
        self.created = int(time.time())
        self._jobs_queue = jobs
        self._jobs: list[Job] = []
        self._news: Callable[[], None] | None = None
        self._parser: AnswerParser = PlainText()
        self._at = self._n_reasoning = 0
        self._called = False

    @property
    def over(self) -> bool:
        """Whether every answer has ended, or the request has failed."""
        return self._at >= len(self._jobs)

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
        """Nobody wants what is not there yet, nor to hear of it."""
        self._news = None
        for job in self._jobs:
            job.news = None
            self._jobs_queue.cancel(job)

    def watch(self, news: Callable[[], None]) -> None:
        """Have ``news`` called whenever ``pieces`` has something to say. Look once yourself: there
        may be something already."""
        self._news = news
        self._begin(self._at)

    async def each(self, add: Callable[[Piece], object]) -> None:
        """Hand every piece over as it comes, to the end; ApiError when the request fails."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def news() -> None:
            if ended.done():
                return
            try:
                for piece in self.pieces():
                    add(piece)
                    if piece.error is not None:
                        raise piece.error
                if self.over:
                    ended.set_result(None)
            except Exception as error:  # the one who brought the tokens must not suffer for it
                ended.set_exception(error)

        self.watch(news)
        news()
        await ended

    def pieces(self) -> list[Piece]:
        """What became known since it was last asked, answer after answer; with nothing new, where
        the answer stands."""
        found: list[Piece] = []
        nothing_new = True
        while not self.over and self._jobs[self._at].events:
            nothing_new = False
            piece = self._piece(self._jobs[self._at])
            if not piece.empty:
                found.append(piece)
            if piece.error is not None:
                self._at = len(self._jobs)
            elif piece.finish:
                self._begin(self._at + 1)
        if nothing_new and not self.over:
            found.append(Piece(self._at, where=self._where(self._jobs[self._at])))
        return found

    def _begin(self, at: int) -> None:
        self._at, self._n_reasoning, self._called = at, 0, False
        if not self.over:
            self._parser = self.ask.parser()
            self._jobs[at].news = self._news

    def _piece(self, job: Job) -> Piece:
        """All that is there of one answer."""
        piece, parser, events = Piece(self._at), self._parser, job.events
        end: End | None = None
        while events:
            event = events.popleft()
            if type(event) is Tokens:
                for item in event.items:
                    before = parser.reasoning
                    piece.deltas += parser.feed(item[1])
                    self._n_reasoning += before or parser.reasoning
                piece.tokens += event.items
            elif isinstance(event, PromptLogprobs):
                piece.prompt += event.items
            elif isinstance(event, End):
                end = event
            elif isinstance(event, Reading) and event.done < event.total:
                # behind the end of the prompt comes the first token, and says more
                piece.where = self._where(job)
        if end is not None:
            piece.deltas += parser.finish()
        if not self._called:
            self._called = any(type(delta) is ToolCallStart for delta in piece.deltas)
        if end is not None:
            report = {**end.report, **_times(job)}
            first = self._at % self.ask.n == 0
            self.usage.add(report, job.generated, self._n_reasoning, first=first)
            try:
                piece.finish = _finish(end, self._called)
            except ApiError as error:
                piece.error = error
        return piece

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
