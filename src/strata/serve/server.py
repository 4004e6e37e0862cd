"""What the routes share: the settings, the link to the engine, the model's text side, the counters.

Everything a route must check before it asks the engine stands here once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from strata import __version__
from strata.core.errors import ContextLengthError, InputError
from strata.core.log import LOG
from strata.core.settings import DEFAULT_CONTEXT_TOKENS, Settings
from strata.core.settings_load import Effective
from strata.serve.errors import ApiError, bad_request
from strata.serve.generation import Ask, Generation
from strata.serve.jobs import Job
from strata.serve.link import Link
from strata.serve.messages import End
from strata.serve.metrics import Metrics
from strata.serve.model_text import ModelText
from strata.serve.text.constraints import check_constraint
from strata.serve.text.specs import ConstraintSpec

T = TypeVar("T")
SHORT_CHARS = 2000
MANY_CHARS = 16
"""Characters a token: fewer in nearly every text."""
PIECE_CHARS = 1 << 16
READING_S = 10.0
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final", "self"})
_PROMPTS = {"completion": "prompt", "responses": "input"}


@dataclass
class Server:
    """One served model."""

    effective: Effective
    link: Link
    metrics: Metrics
    text: ModelText
    """Known by name at once (and no reason given); the rest comes with ``read_text``."""
    read_text: Callable[[], ModelText]
    started: float = field(default_factory=time.time)
    _reading: asyncio.Task[None] | None = None

    @property
    def settings(self) -> Settings:
        """As asked for when the server was started."""
        return self.effective.settings

    async def start(self) -> None:
        """Start the engine, and read the tokenizer meanwhile."""
        await self.link.start()
        self._reading = asyncio.create_task(self._read_text())

    async def stop(self) -> None:
        """End the engine."""
        if self._reading is not None:
            self._reading.cancel()
        await self.link.stop()

    async def _read_text(self) -> None:
        try:
            self.text = await asyncio.to_thread(self.read_text)
        except (InputError, OSError) as error:  # the engine says the same, and why
            self.text = replace(self.text, why_not=str(error))

    def ended(self, job: Job, end: End) -> None:
        """A request is over: count it, and say so in the log."""
        self.metrics.ended(job, end)
        if self.settings.wire_log == "requests":
            report = end.report
            LOG.info(
                "%s %d: %d prompt tokens (%s reused), %d written, %s, %.2f s",
                job.kind,
                job.request.id,
                len(job.request.tokens),
                report.get("reused_tokens", 0),
                job.generated,
                end.error or end.finish,
                time.monotonic() - job.created,
            )
            for line in report.get("notes", ()):
                LOG.info("%s %d: %s", job.kind, job.request.id, line)

    def require_ready(self) -> None:
        """503 with the phase while there is no engine."""
        health = self.link.health
        if health.phase != "ready" or not (self.text.tokenizer or self.text.why_not):
            raise ApiError(
                503,
                f"not ready ({health.phase}): {health.detail}",
                "not_ready",
                retry_s=2 if health.phase != "failed" else 30,
            )

    def require_model(self, name: str | None) -> None:
        """404 for a model that is not served."""
        served = self.text.name
        if name in (None, "", served) or self.settings.any_model_name:
            return
        raise ApiError(
            404,
            f"the model {name!r} is not served here; this server has: {served} (start with "
            f"--any-model-name to answer for any name)",
            "model_not_found",
            field="model",
        )

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together; 0 while loading."""
        return int(self.link.health.info.get("context_tokens", 0))

    @property
    def planned_context_tokens(self) -> int | None:
        """The same, and while the engine loads what it will be; None when nothing is known yet."""
        made_for = min(self.text.context_tokens, DEFAULT_CONTEXT_TOKENS)
        return self.context_tokens or self.settings.context or made_for or None

    async def text_known(self) -> None:
        """Wait, a little, until the checkpoint's words are read: what is said about the model must
        not change later."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=READING_S)

    @property
    def fingerprint(self) -> str:
        """Version and mode: answers with the same one come from the same arithmetic."""
        return f"strata-{__version__}-{self.link.health.info.get('mode', 'loading')}"

    def sampling(self, prompt_tokens: int, given: dict[str, Any]) -> dict[str, Any]:
        """Request settings: what the request says, else what the server was started with, else what
        the model suggests. ApiError for a bad value."""
        values = {
            name: value
            for name, value in self.text.sampling.items()
            if not self.effective.asked(name)
        }
        values |= {name: value for name, value in given.items() if value is not None}
        room = max(1, self.context_tokens - prompt_tokens + 1)
        if "max_tokens" not in values:
            values["max_tokens"] = (
                self.settings.max_tokens if self.effective.asked("max_tokens") else room
            )
        checked = {**values, "max_tokens": max(1, values["max_tokens"])}
        try:
            settled = self.settings.for_request(**checked)
        except InputError as error:
            raise bad_request(error) from None
        self.require_ids(values.get("logit_bias") or (), "logit_bias")
        if "stop" in values:
            values["stop"] = list(settled.stop)
        return values

    def require_room(self, tokens: list[int], kind: str) -> None:
        """400 for a prompt that does not fit; kind: of the request."""
        field = _PROMPTS.get(kind, "messages")
        if not tokens:
            raise ApiError(400, "the prompt is empty", "empty_prompt", field=field)
        if len(tokens) > self.context_tokens:
            raise bad_request(ContextLengthError(len(tokens), self.context_tokens), field)
        self.require_ids(tokens, field)

    def require_length(self, texts: Iterable[str], kind: str) -> None:
        """400 for texts far beyond the context (twice at least), found out without cutting all of
        them into tokens: that would take minutes for what a body may hold. kind: of the request."""
        found = list(texts)
        if sum(map(len, found)) <= MANY_CHARS * self.context_tokens:
            return
        count = 0
        for text in found:
            for at in range(0, len(text), PIECE_CHARS):
                count += len(self.text.tokens.encode(text[at : at + PIECE_CHARS], add_bos=False))
                if count > 2 * self.context_tokens:  # more than cuts between pieces can add
                    known = bad_request(
                        ContextLengthError(count, self.context_tokens),
                        _PROMPTS.get(kind, "messages"),
                    )
                    known.message = known.message.replace("has", "has more than", 1)
                    raise known

    def require_ids(self, tokens: Iterable[int], field: str) -> None:
        """400 for ids that are no tokens."""
        vocabulary = int(self.link.health.info.get("vocabulary", 0))
        outside = [t for t in tokens if not 0 <= t < vocabulary]
        if outside:
            raise ApiError(
                400,
                f"token id {outside[0]} is outside the vocabulary of {vocabulary}",
                "invalid_token",
                field=field,
            )

    def template_variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """chat_template_kwargs; 400 for names that come from the request itself."""
        variables = dict(given or {})
        taken = sorted(_OURS & variables.keys())
        if taken:
            raise ApiError(
                400,
                f"chat_template_kwargs may not set {taken[0]}; it comes from the request itself",
                "invalid_request",
                field="chat_template_kwargs",
            )
        return variables

    def require_constraint(self, spec: ConstraintSpec | None, field: str) -> None:
        """400 for a form that cannot be enforced; field: what asks for it."""
        if spec is not None:
            try:
                check_constraint(spec)
            except InputError as error:
                raise ApiError(400, str(error), "invalid_schema", field=field) from None

    def begin(self, ask: Ask) -> Generation:
        """Queue a request that is in order."""
        self.require_ready()
        for prompt in ask.prompts:
            self.require_room(prompt, ask.kind)
        generation = Generation(ask, self.link.jobs)
        generation.submit()
        return generation

    async def apart(self, work: Callable[[], T], n_chars: int) -> T:
        """Work that may take a while (templates, tokens of long texts), off the event loop; at
        once for short texts, where changing threads would cost more."""
        try:
            return work() if n_chars < SHORT_CHARS else await asyncio.to_thread(work)
        except InputError as error:
            raise bad_request(error) from None
