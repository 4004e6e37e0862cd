"""The public face: a loaded model that answers in text. Joins engine, tokenizer, session and
sampler.

One sequence at a time: a new request ends the answer before it. Not for use from several threads at
once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from strata.core.closing import Closing
from strata.core.errors import InputError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import AUTO, Effective, load_settings
from strata.engine.build import Check, build
from strata.engine.conversations import Conversations
from strata.engine.draft import build_drafter
from strata.engine.engine import Engine
from strata.engine.logpos import LogposWriter, extra_token
from strata.engine.machine import probe
from strata.engine.quality_meter import meter_of, metered
from strata.engine.remember import conversations
from strata.engine.session import Answer, Session, TextDecoder
from strata.engine.timing import RequestNotes
from strata.formats.detokenize import StreamDecoder
from strata.formats.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
NO_TEXT = "its checkpoint has no tokenizer that works here"
LoadProgress = Callable[[str, int, int], None]
"""(phase, bytes done, bytes in all)."""


def load(
    path: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    config: str | Path | None = None,
    progress: LoadProgress | None = None,
    **settings: Any,
) -> Model:
    """Load a model from a GGUF or safetensors file, one of its parts, or a folder.

    device: None runs on the GPU if there is a usable one, else on the CPU; ``report`` says which.
    settings: any setting by its command line name with underscores (docs/SETTINGS.md); they outrank
    the environment and the TOML file ``config``. Raises SettingError for unknown or impossible
    settings, FormatError or UnsupportedError for the file, DoesNotFitError before anything is
    allocated.
    """
    for name in settings:
        if name in SETTINGS and SETTINGS[name].scope == "serve":
            raise SettingError(f"{name} is a setting of strata serve; it has no effect here")
    given = {"device": device, "dtype": dtype, **settings}
    return load_effective(path, _where_it_can(load_settings(given, config=config)), progress)


def _where_it_can(asked: Effective) -> Effective:
    """A program that says nothing about the device runs where it can; the report and settings tell
    where.

    The command line is stricter: there the CPU alone is only used when asked for.
    """
    if asked.asked("device") or probe().gpu is not None:
        return asked
    sources = {**asked.sources, "device": AUTO}
    return Effective(replace(asked.settings, device="cpu"), sources)


def load_effective(
    path: str | Path,
    asked: Effective,
    progress: LoadProgress | None = None,
    check: Check | None = None,
) -> Model:
    """Load with settings gathered before (the command line's way). check: raises before a weight
    is read."""
    engine = build(path, asked, progress, check)
    try:
        return Model(engine, conversations(engine, path))
    except BaseException:
        engine.close()
        raise


class Model(Closing):
    """A loaded model. Close it, or use it in a ``with`` statement."""

    def __init__(self, engine: Engine, memory: Conversations | None = None) -> None:
        self.engine = engine
        self.memory = memory
        """What is kept of earlier conversations; None keeps the last one only."""
        self.settings: Settings = engine.settings
        """Complete: nothing in it is automatic but ``seed`` and memory limits."""
        self._tokenizer = _tokenizer_of(engine)
        ends = self._tokenizer.eos_ids if self._tokenizer else ()
        self.eos_tokens: tuple[int, ...] = tuple(dict.fromkeys((*engine.spec.eos_tokens, *ends)))
        """Tokens that end an answer: the model's and the tokenizer's."""
        self._logpos: LogposWriter | None = None
        if self.settings.logpos is not None:
            extra = extra_token(self.settings, self.eos_tokens, engine.n_vocab)
            self._logpos = LogposWriter(self.settings.logpos, self.settings.logpos_top, extra)
        self._notes = RequestNotes(engine, build_drafter(self.settings))
        self.meter = meter_of(engine, self.settings)
        """What lossy windows cost, measured while they run; None unless asked for."""
        self._session = Session(
            metered(self._notes.engine, self.meter),
            self._notes.drafter,
            self._decoder,
            self.eos_tokens,
            self.settings.spec,
            self._logpos,
            memory,
        )

    @property
    def session(self) -> Session:
        """The model's one sequence, by token ids; ``generate`` is the easy way."""
        return self._session

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; InputError when it has none."""
        return self.engine.tokenizer

    @property
    def report(self) -> list[str]:
        """Start-up lines: what was loaded, and the settings in effect."""
        return self.engine.report

    def counter_lines(self) -> list[str]:
        """What windows left out since the start, for people; nothing when nothing was."""
        lines = self.engine.service.counters.lines()
        return lines if self.meter is None else [*lines, *self.meter.lines()]

    def notes(self) -> list[str]:
        """--decode-timing, --verify-profile, --adapt-swaps: lines about the windows since they were
        asked for last, as a report that is printed ends with."""
        return self._notes()

    def read_again(self) -> None:
        """--quality-reread: read the last answer once more exactly, now; nothing without it."""
        while self.meter is not None and self.meter.idle():
            pass

    @property
    def chats(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def logits(
        self,
        token_ids: Sequence[int],
        through: Literal["prompt", "windows"] = "prompt",
        window: int = 1,
    ) -> npt.NDArray[np.float32]:
        """Logits float32 [T, V] of a text of T tokens: row t is the distribution after token t.

        through: "prompt" reads in chunks, "windows" in verify windows of ``window`` tokens. Ends an
        answer in progress and drops the kept state.
        """
        tokens = _token_ids(token_ids)
        self._session.forget()
        try:
            rows = self.engine.logits(tokens, through, window)
        except BaseException:
            self._session.void()
            raise
        self._session.forget()
        return rows

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: plain text, ids, or messages for the chat template."""
        if isinstance(prompt, str) or _are_messages(prompt):
            return text_tokens(self.tokenizer, cast(str | Sequence[Message], prompt))
        return _token_ids(prompt)

    def generate(
        self,
        prompt: Prompt,
        *,
        progress: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Continue a text or ids, or answer messages; an iterator of TokenEvents (token, text,
        finish).

        sampling: request settings by name (temperature=0.7, seed=1, stop=["END"], ...); the others
        stay as loaded. progress: (prompt tokens read, in all). Bad settings and too long a prompt
        raise here, before any work. The answer's ``report`` has counts and times. A prompt that
        continues the last one reuses its state.
        """
        settings = self.settings.for_request(**sampling)
        if sampling.get("stop") and self._tokenizer is None:
            raise SettingError(f"stop: this model writes ids and no text: {NO_TEXT}")
        tokens = self.prompt_tokens(prompt)
        continues = isinstance(prompt, str) or not _are_messages(prompt)
        answer = self._session.answer(tokens, settings, self._decoder(continues), progress)
        answer.report.more = self._notes
        return answer

    def close(self) -> None:
        """Stop the workers and let the memory go. Closing twice is fine."""
        try:
            self._session.end()
            if self.memory is not None:
                self.memory.save()
        finally:
            if self._logpos is not None:
                self._logpos.close()
            self.engine.close()

    def _decoder(self, continues: bool = False) -> TextDecoder:
        if self._tokenizer is None:
            return _NoText()
        return StreamDecoder(self._tokenizer, continues=continues)


class _NoText:
    """Decoder of a checkpoint without a tokenizer: ids only."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def text_tokens(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> list[int]:
    """Token ids of a plain text, or of messages for the chat template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.chat_prompt(prompt)


def _tokenizer_of(engine: Engine) -> Tokenizer | None:
    try:
        return engine.tokenizer
    except InputError:
        return None


def _are_messages(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _token_ids(tokens: object) -> list[int]:
    """Ids from any sequence or array of whole numbers; nothing is rounded or parsed."""
    try:
        if isinstance(tokens, str | bytes | Mapping):
            raise TypeError
        return [operator.index(token) for token in tokens]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise InputError(
            "a prompt is a text, a list of token ids (whole numbers), or a list of messages (role, "
            "content)"
        ) from None
