"""Reads texts through windows of one engine and compares every position with the reference.

The reference's logits of all positions lie in a temporary file (mapped, so the page cache holds
them where it can): n * V * 4 bytes. Arms are compared row by row as they come; none is kept.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strata.core.closing import Closing
from strata.core.divergence import Array
from strata.core.errors import InputError, NumericsError
from strata.core.settings import Settings
from strata.core.types import Place
from strata.engine.engine import Engine
from strata.quality.arms import Arm, use_variant
from strata.quality.record import Recording
from strata.quality.scores import ArmResult, Scores, checked_log_softmax
from strata.quality.texts import Text

Progress = Callable[[str, int, int], None]
"""(what is being read, positions done, positions in all)"""

Logits = npt.NDArray[np.float32]


class Reference(Closing):
    """Logits of the exact run, float32 [n, V] over all texts. Close it to remove its file."""

    def __init__(self, n_positions: int, n_vocab: int) -> None:
        n_bytes = n_positions * n_vocab * 4
        self._folder = tempfile.mkdtemp(prefix="strata-quality-")
        free = shutil.disk_usage(self._folder).free
        if n_bytes > free:
            self.close()
            raise InputError(
                f"the reference's logits need {n_bytes / 2**30:.1f} GiB in {tempfile.gettempdir()} "
                f"({n_positions} positions of {n_vocab} tokens), {free / 2**30:.1f} GiB are free; "
                f"read less with --tokens, or set TMPDIR to a larger place"
            )
        path = Path(self._folder) / "logits"
        self.rows: Logits = np.memmap(path, np.float32, "w+", shape=(n_positions, n_vocab))

    def close(self) -> None:
        """Remove the file."""
        shutil.rmtree(self._folder, ignore_errors=True)


def read_windows(engine: Engine, text: Text, window: int, arm: str) -> Iterator[tuple[int, Logits]]:
    """(position, logits [V] after it) of every token of a text, read from its beginning through
    windows of ``window`` tokens, all kept."""
    engine.reset()
    for start in range(0, len(text.tokens), window):
        tokens = text.tokens[start : start + window]
        rows_TV = engine.run_window(tokens)
        try:
            engine.commit(len(tokens))
        except NumericsError as error:
            raise NumericsError(f"arm {arm}, {text.name}: {error}") from None
        for i, row in enumerate(rows_TV):
            yield start + i, row
    engine.reset()


def read_reference(
    engine: Engine,
    texts: Sequence[Text],
    window: int,
    into: Reference,
    progress: Progress | None = None,
) -> float:
    """Fill the reference; seconds of the run."""
    began, n = time.perf_counter(), 0
    for text in texts:
        for _, row in read_windows(engine, text, window, "reference"):
            into.rows[n] = row
            n += 1
            if progress is not None:
                progress("reference", n, len(into.rows))
    return time.perf_counter() - began


def measure_arm(
    engine: Engine,
    arm: Arm,
    settings: Settings,
    texts: Sequence[Text],
    window: int,
    reference: Reference,
    *,
    progress: Progress | None = None,
    recording: Recording | None = None,
) -> ArmResult:
    """Run an arm on an engine that can (``Arm.is_variant``, or loaded for it) and compare.

    recording: also gets every position's likeliest tokens.
    """
    used = use_variant(engine, settings, window)
    before = _places(engine)
    began, scores = time.perf_counter(), Scores()
    for index, text in enumerate(texts):
        for position, row in read_windows(engine, text, window, arm.name):
            expected = reference.rows[len(scores.position)]
            p = checked_log_softmax(expected, position, "reference", text.name)
            q = checked_log_softmax(row, position, arm.name, text.name)
            target = _next(text, position)
            scores.add(position, p, q, target)
            if recording is not None:
                recording.add(index, position, q, target)
            if progress is not None:
                progress(arm.name, len(scores.position), len(reference.rows))
    rows = {name: n - before[name] for name, n in _places(engine).items() if n != before[name]}
    seconds = time.perf_counter() - began
    buckets, note = tuple(scores.buckets()), "; ".join(used.lines)
    return ArmResult(arm.name, dict(arm.overrides), buckets, rows, used.off, seconds, note)


def log_probabilities(logits_V: Logits, position: int, text: Text) -> Array:
    """Log-probabilities [V] of a row of the reference."""
    return checked_log_softmax(logits_V, position, "reference", text.name)


def _next(text: Text, position: int) -> int | None:
    return text.tokens[position + 1] if position + 1 < len(text.tokens) else None


def _places(engine: Engine) -> dict[str, int]:
    """Routed rows so far by place."""
    return {place.name: engine.service.counters.total(place) for place in Place}
