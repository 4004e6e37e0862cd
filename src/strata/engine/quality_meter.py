"""What lossy windows cost, measured while they run: the live meter and the re-read.

The meter (--quality-meter 1/64) runs every 64th window exactly as well, from the same state, and
compares: *conditional* KL. It sees what this window's late or skipped rows change, and not what
earlier windows left wrong in the state. The re-read (--quality-reread) reads a finished answer once
more exactly, from its beginning, when there is nothing else to do: *cumulative* KL, of everything.

The exact window runs first and is not committed, so nothing of it is left when the real one runs;
which windows are compared depends on their count alone. Stands between a session and its engine;
without the settings nothing stands there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from strata.core.divergence import kl_top_logits
from strata.core.errors import SettingError
from strata.core.settings import Settings
from strata.engine.engine import Engine
from strata.engine.prefill import cuts
from strata.engine.session import EngineLike, Logits
from strata.engine.window_output import WindowOutput
from strata.memory.state import SequenceState
from strata.window.run import PLAIN, WindowRunner

KEPT_BYTES = 512 << 20
"""Most memory for the rows of an answer that waits for its re-read; what comes behind is not
compared."""

REREAD_CHUNK = 32
"""Positions of one step of the re-read: a request that arrives waits for one step at most."""


@dataclass
class Divergences:
    """Running means over positions."""

    n: int = 0
    kl_sum: float = 0.0
    same: int = 0

    def add(self, exact_V: npt.NDArray[np.float32], lossy_V: npt.NDArray[np.float32]) -> None:
        """Compare one position; rows with NaN count nothing (committing them is refused)."""
        if not (np.isfinite(exact_V).all() and np.isfinite(lossy_V).all()):
            return
        self.n += 1
        self.kl_sum += kl_top_logits(exact_V, lossy_V)
        self.same += int(np.argmax(exact_V) == np.argmax(lossy_V))

    @property
    def kl(self) -> float:
        """Mean top-20 KL(exact || as run), nats; 0 of nothing."""
        return self.kl_sum / self.n if self.n else 0.0

    @property
    def top1(self) -> float:
        """Share of positions with the same likeliest token; 1 of nothing."""
        return self.same / self.n if self.n else 1.0

    def text(self) -> str:
        """For people."""
        return f"KL {self.kl:.4f}, top-1 {100 * self.top1:.2f} % over {self.n} positions"


@dataclass
class _Answer:
    """What the last answer's windows said, from position ``start`` on."""

    start: int
    rows: list[npt.NDArray[np.float16]] = field(default_factory=list)
    n_dropped: int = 0


class QualityMeter:
    """Both measurements of one engine. every: 0, or which windows are compared (each 64th)."""

    def __init__(self, engine: Engine, every: int, reread: bool) -> None:
        self._engine = engine
        self._every = every
        self._reread = reread
        self._n_windows = 0
        self._exact: Logits | None = None
        self._rows: WindowOutput | None = None
        self._answer: _Answer | None = None
        self._work: Iterator[None] | None = None
        self.conditional = Divergences()
        self.cumulative = Divergences()
        self.rerun_s = 0.0
        """Seconds of exact windows."""
        self.own_s = 0.0
        """Seconds of everything else the meter does."""
        self.n_metered = 0

    @property
    def _lossy(self) -> bool:
        return self._engine.mode != "exact"

    def verify(self, inner: EngineLike, tokens: Sequence[int]) -> WindowOutput:
        """The engine's window; with an exact one before it when it is this window's turn."""
        self._exact = None
        if self._lossy and self._every:
            if self._n_windows % self._every == 0:
                began = time.perf_counter()
                self._exact = self._run_exact(tokens)
                self.rerun_s += time.perf_counter() - began
                self.n_metered += 1
            self._n_windows += 1
        self._rows = inner.verify(tokens)
        return self._rows

    def committed(self, n: int) -> None:
        """The first n tokens of the window were kept: compare and keep their rows."""
        began = time.perf_counter()
        output = self._rows
        if output is not None and self._exact is not None:
            for t, exact_V in enumerate(self._exact[:n]):
                self.conditional.add(exact_V, output.row(t))
        if output is not None and self._reread and self._lossy:
            self._keep(output.logits()[:n])
        self._exact = self._rows = None
        self.own_s += time.perf_counter() - began

    def begin(self) -> None:
        """A prompt is read: whatever waited for a re-read is forgotten."""
        self._answer = self._work = None

    def idle(self) -> bool:
        """One step of the re-read; whether more is left."""
        if self._work is None:
            if self._answer is None:
                return False
            self._work = self._read_again(self._answer)
            self._answer = None
        for _ in self._work:
            return True
        self._work = None
        return False

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        if self._every and self.n_metered:
            lines.append(
                f"quality meter: conditional {self.conditional.text()} in {self.n_metered} of "
                f"{self._n_windows} windows (sees each window's own error, not the state's)"
            )
        if self.cumulative.n:
            lines.append(f"quality re-read: cumulative {self.cumulative.text()}")
        return lines

    def facts(self) -> dict[str, Any]:
        """For status and metrics."""
        return {
            "conditional_kl": self.conditional.kl,
            "conditional_top1": self.conditional.top1,
            "conditional_positions": self.conditional.n,
            "cumulative_kl": self.cumulative.kl,
            "cumulative_top1": self.cumulative.top1,
            "cumulative_positions": self.cumulative.n,
            "windows": self._n_windows,
            "windows_metered": self.n_metered,
            "meaning": "conditional: the error of single windows from the state as it is; "
            "cumulative: of whole answers against an exact reading",
        }

    def _run_exact(self, tokens: Sequence[int]) -> Logits:
        """Logits [T, V] of an exact window; nothing is committed, so nothing of it is left."""
        back = self._engine.select("exact")
        try:
            return self._engine.run_window(tokens)
        finally:
            back()

    def _keep(self, rows_TV: Logits) -> None:
        answer, here = self._answer, self._engine.length
        if answer is None or answer.start + len(answer.rows) + answer.n_dropped != here:
            answer = self._answer = _Answer(here)
        for row in rows_TV:
            if (len(answer.rows) + 1) * row.nbytes // 2 > KEPT_BYTES or answer.n_dropped:
                answer.n_dropped += 1
                continue
            # near the top, where it matters, float16 is fine once the top is 0
            answer.rows.append(np.maximum(row - row.max(), -60000).astype(np.float16))

    def _read_again(self, answer: _Answer) -> Iterator[None]:
        """Read the committed tokens exactly into a state of their own, a piece at a time."""
        runner, tokens = self._engine.runner, self._engine.tokens
        n = min(answer.start + len(answer.rows), len(tokens))
        specs, device = runner.network.state_specs(), runner.network.device
        state = SequenceState(specs, n, device)
        own = WindowRunner(runner.network, runner.service, state, PLAIN)
        chunk_tokens = self._engine.settings.prompt_chunk
        for start, stop in _pieces(answer.start, n, chunk_tokens):
            n_head = max(stop - max(start, answer.start), 1)
            logits = own.run(own.chunk(stop - start, n_head), tokens[start:stop])
            rows = logits.to(torch.float32).numpy()
            own.commit(stop - start)
            for i in range(max(start, answer.start), stop):
                lossy = answer.rows[i - answer.start].astype(np.float32)
                self.cumulative.add(rows[i - (stop - n_head)], lossy)
            yield


def _pieces(answer_start: int, stop: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """The prompt's chunks as they were cut; then the answer in small pieces."""
    yield from cuts(0, min(answer_start, stop), min(chunk_tokens, REREAD_CHUNK))
    yield from cuts(answer_start, stop, REREAD_CHUNK)


class MeteredEngine:
    """An engine for sessions whose windows are watched."""

    def __init__(self, inner: EngineLike, meter: QualityMeter) -> None:
        self._inner, self._meter = inner, meter

    def __getattr__(self, name: str) -> object:
        """Whatever else a session asks of an engine."""
        return getattr(self._inner, name)

    def read_prompt(self, *args: Any, **more: Any) -> Logits:
        """As the engine; a new answer begins."""
        self._meter.begin()
        return self._inner.read_prompt(*args, **more)

    def verify(self, tokens: Sequence[int]) -> WindowOutput:
        """As the engine."""
        return self._meter.verify(self._inner, tokens)

    def run_window(self, tokens: Sequence[int]) -> Logits:
        """As the engine."""
        return self.verify(tokens).logits()

    def commit(self, n: int) -> None:
        """As the engine."""
        self._meter.committed(n)
        self._inner.commit(n)


def meter_of(engine: Engine, settings: Settings) -> QualityMeter | None:
    """The meter that the settings ask for; None without them. SettingError for a re-read on a
    device."""
    share = settings.quality_meter
    if not share and not settings.quality_reread:
        return None
    if settings.quality_reread and not isinstance(engine.runner, WindowRunner):
        raise SettingError("--quality-reread needs --device cpu in this version")
    return QualityMeter(engine, share.denominator if share else 0, settings.quality_reread)


def metered(inner: EngineLike, meter: QualityMeter | None) -> EngineLike:
    """The engine itself without a meter."""
    return inner if meter is None else cast(EngineLike, MeteredEngine(inner, meter))
