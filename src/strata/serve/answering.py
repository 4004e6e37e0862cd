"""Answers one request on a session, in the engine process. Knows no models and no sockets.

Joins what the request asks for (text with marked control tokens, log-probabilities, a constraint)
to the session's hooks, and looks between windows whether the request is cancelled.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.settings import Settings
from strata.engine.events import Report
from strata.engine.session import Session, TextDecoder
from strata.formats.detokenize import StreamDecoder, TokenBytes
from strata.serve.engine_loop import Control
from strata.serve.messages import Generate
from strata.serve.text.constraints import constraint_for
from strata.serve.text.deltas import CONTROL_CLOSE, CONTROL_OPEN
from strata.serve.text.specs import ConstraintSpec, TokenizerLike

Logits = npt.NDArray[np.float32]


class MarkedDecoder:
    """Text of an answer, with control tokens spelled between marks (see text.deltas)."""

    def __init__(self, tokenizer: TokenBytes, *, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._continues = continues
        self._stream = StreamDecoder(tokenizer, continues=continues)

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        if not self._tokenizer.is_control(token):
            text = self._stream.push(token)
            return text if text.isascii() else _without_marks(text)
        before = self._stream.finish()
        self._stream = StreamDecoder(self._tokenizer, continues=True)
        spelling = _without_marks(self._tokenizer.token_bytes(token).decode("utf-8", "replace"))
        return f"{before}{CONTROL_OPEN}{spelling}{CONTROL_CLOSE}"

    def finish(self) -> str:
        """The rest."""
        return self._stream.finish()


def answer(
    session: Session,
    tokenizer: TokenizerLike | None,
    decoder: TextDecoder,
    base: Settings,
    request: Generate,
    control: Control,
) -> tuple[str, dict[str, Any]]:
    """Carry a request out; (finish, report as plain data). base: settings that the request's own
    outrank. max_tokens 0 only reads the prompt."""
    scored_s = 0.0
    if request.prompt_logprobs >= 0:
        scored_s = _score(session, request, control)
    if request.sampling.get("max_tokens") == 0:
        return "length", {"prompt_tokens": len(request.tokens)}
    settings = base.for_request(**request.sampling)
    constraint = None
    if request.constraint is not None and tokenizer is not None:
        constraint = constraint_for(ConstraintSpec.from_json(request.constraint), tokenizer)
    extras: list[list[Any]] = []

    def picked(row: Logits, token: int) -> None:
        extras.append(_logprobs(row, token, request.logprobs))

    events = session.answer(
        request.tokens,
        settings,
        decoder,
        control.reading,
        constraint=constraint,
        picked=picked if request.logprobs >= 0 else None,
    )
    finish = "cancelled"
    for event in events:
        items = [event.token, event.text]
        control.tokens([items + (extras.pop(0) if extras else [])])
        if event.finish:
            finish = event.finish
        elif control.cancelled():
            events.close()
            break
    report = report_data(events.report)
    if request.prompt_logprobs >= 0:  # what this request has just read itself was not kept before
        report |= {"reused_tokens": 0, "inexact_tokens": 0}
        report["prompt_s"] += scored_s
    return finish, report


def report_data(report: Report) -> dict[str, Any]:
    """A session's report as plain data."""
    return {
        "prompt_tokens": report.reuse.prompt_tokens,
        "reused_tokens": report.reuse.reused_tokens,
        "first_difference": report.reuse.first_difference,
        "inexact_tokens": report.reuse.inexact_tokens,
        "mode": report.mode,
        "seed": report.seed,
        "stop_text": report.stop_text,
        "prompt_s": report.prompt_s,
        "decode_s": report.decode_s,
        "drafts": asdict(report.drafts),
    }


def _score(session: Session, request: Generate, control: Control) -> float:
    """Log-probabilities of the prompt's own tokens; the first has none. Seconds it took."""
    start = time.perf_counter()
    tokens = request.tokens
    control.prompt_logprobs(0, [[None, []]])

    def each(start: int, rows_TV: Logits) -> None:
        items = [
            _logprobs(row, tokens[start + i + 1], request.prompt_logprobs)
            for i, row in enumerate(rows_TV)
            if start + i + 1 < len(tokens)
        ]
        control.prompt_logprobs(start + 1, items)

    session.scored(tokens, each, control.reading)
    return time.perf_counter() - start


def _logprobs(row_V: Logits, token: int, n_top: int) -> list[Any]:
    """[log-probability of the token, [[id, log-probability] of the likeliest]], before penalties
    and temperature: the model's own."""
    row = row_V.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    top: list[list[Any]] = []
    if n_top:
        ids = np.argpartition(row, -n_top)[-n_top:] if n_top < len(row) else np.arange(len(row))
        ids = ids[np.lexsort((ids, -row[ids]))]
        top = [[int(i), float(row[i])] for i in ids]
    return [float(row[token]), top]


def _without_marks(text: str) -> str:
    return text.replace(CONTROL_OPEN, "\ufffd").replace(CONTROL_CLOSE, "\ufffd")
