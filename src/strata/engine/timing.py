"""Where the time of an answer's windows went: one line for --decode-timing, one for
--verify-profile.

Stands between a session and its engine and drafter; without the settings nothing stands there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from strata.core.types import Place
from strata.engine.draft import Drafter
from strata.engine.engine import Engine
from strata.engine.session import EngineLike, Logits
from strata.engine.window_output import WindowOutput
from strata.window.run import WindowRunner
from strata.window.stamps import WAITS, EventClock, HostClock, StepTimes


class RequestNotes:
    """Lines about the windows since the last call. ``engine`` and ``drafter`` go to the
    session."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self._engine = engine
        self._spent = _Spent()
        self._timed = engine.settings.decode_timing
        replayed = measure_on_device(engine)
        self.engine: EngineLike = engine
        self.drafter: Drafter = drafter
        if self._timed or replayed is not None:
            self.engine = cast(EngineLike, TimedEngine(engine, self._spent, replayed))
        if self._timed:
            self.drafter = TimedDrafter(drafter, self._spent)

    def __call__(self) -> list[str]:
        """What was measured; counting begins anew."""
        lines = []
        profile = profile_of(self._engine)
        if self._timed and self._spent.windows:
            lines.append(self._line(profile))
        if profile is not None:
            lines.append(profile.line())
            profile.clear()
        self._spent.clear()
        adapter = self._engine.adapter
        if adapter is not None and adapter.counts.windows:
            lines.append(adapter.counts.line())
        return lines

    def _line(self, profile: StepTimes | None) -> str:
        spent, n = self._spent, self._spent.windows
        layers = len({layer for layer, _ in self._engine.service.counters.rows_LP}) or 1
        experts = ", ".join(
            f"{name} {sum(spent.rows.get(p, 0) for p in places) / n / layers:.2f}"
            for name, places in (
                ("CPU rows", (Place.CPU, Place.CPU_LATE)),
                ("cached", (Place.FAST,)),
                ("PCIe", (Place.PCIE,)),
            )
        )
        waits = ""
        if profile is not None:
            profile.fold()
            waited = sum(s for (name, _), s in profile.seconds.items() if name in WAITS)
            waits = f" (waits for the CPU {1e3 * waited / n:.2f})"
        total = spent.run_s + spent.commit_s + spent.draft_s
        return (
            f"decode timing: {n} windows, {spent.tokens / n:.2f} tokens asked and "
            f"{spent.kept / n:.2f} kept a window; {1e3 * total / n:.2f} ms/window = "
            f"verify {1e3 * spent.run_s / n:.2f}{waits} + commit {1e3 * spent.commit_s / n:.2f} + "
            f"draft {1e3 * spent.draft_s / n:.2f}; per layer and window: {experts}"
        )


def profile_of(engine: Engine) -> StepTimes | None:
    """The step times of an engine that measures them."""
    variant = engine.runner.variant
    changes = (*variant.transforms, *getattr(variant, "last", ()))
    return next((t for t in changes if isinstance(t, StepTimes)), None)


def measure_on_device(engine: Engine) -> StepTimes | None:
    """Let a device's windows measure their steps, if asked to; None elsewhere. The device's
    variants are no part of the table of ``engine/variants.py``."""
    settings, runner = engine.settings, engine.runner
    if isinstance(runner, WindowRunner):
        return None
    if not settings.verify_profile:
        return None
    compiled = runner.network.device.type == "cuda"
    times = StepTimes(engine.spec, EventClock if compiled else HostClock)
    changes = (*runner.variant.last, times)
    runner.variant = replace(runner.variant, name=f"{runner.variant.name} timed", last=changes)
    return times if compiled else None


def _rows_by_place(engine: Engine) -> dict[Place, int]:
    """Routed rows since the start."""
    found: dict[Place, int] = {}
    for (_, place), n in engine.service.counters.rows_LP.items():
        found[place] = found.get(place, 0) + n
    return found


class _Spent:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing yet."""
        self.windows = self.tokens = self.kept = 0
        self.rows: dict[Place, int] = {}
        self.run_s = self.commit_s = self.draft_s = 0.0


class TimedEngine:
    """An engine for sessions, with the clock running in windows and commits."""

    def __init__(self, engine: Engine, spent: _Spent, replayed: StepTimes | None = None) -> None:
        self._engine, self._spent, self._replayed = engine, spent, replayed

    def __getattr__(self, name: str) -> object:
        """Whatever else a session asks of an engine."""
        return getattr(self._engine, name)

    @property
    def n_vocab(self) -> int:
        """V."""
        return self._engine.n_vocab

    @property
    def context_tokens(self) -> int:
        """Most committed tokens."""
        return self._engine.context_tokens

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        return self._engine.tokens

    def reset(self) -> None:
        """Commit nothing."""
        self._engine.reset()

    def read_prompt(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Logits:
        """Commit the tokens; logits after the last."""
        return self._engine.read_prompt(tokens, progress)

    def verify(self, tokens: Sequence[int]) -> WindowOutput:
        """What comes after each token."""
        before = _rows_by_place(self._engine)
        start = time.perf_counter()
        output = self._engine.verify(tokens)
        self._spent.run_s += time.perf_counter() - start
        if self._replayed is not None:
            self._replayed.ended(len(tokens))
        for place, n in _rows_by_place(self._engine).items():
            self._spent.rows[place] = self._spent.rows.get(place, 0) + n - before.get(place, 0)
        self._spent.windows += 1
        self._spent.tokens += len(tokens)
        return output

    def commit(self, n: int) -> None:
        """Keep the first n tokens."""
        start = time.perf_counter()
        self._engine.commit(n)
        self._spent.commit_s += time.perf_counter() - start
        self._spent.kept += n


class TimedDrafter:
    """A drafter with the clock running in ``propose``."""

    def __init__(self, drafter: Drafter, spent: _Spent) -> None:
        self._drafter, self._spent = drafter, spent
        self.vocabulary = drafter.vocabulary

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text."""
        self._drafter.begin(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """More of the text."""
        self._drafter.extend(tokens)

    def propose(self, n: int) -> list[int]:
        """Up to n drafts."""
        start = time.perf_counter()
        drafts = self._drafter.propose(n)
        self._spent.draft_s += time.perf_counter() - start
        return drafts
