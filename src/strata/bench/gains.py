"""What deferral should gain, beside what it gained.

With m the next layer's mixer, f the fast side's experts and c the CPU's rows, deferral of all rows
gains min(m, max(0, c - f)) in a layer, and min(m, max(0, c - max(f, c_on))) where rows that take
c_on stay on time: the sum over layers, a mean over sampled windows. m, f and c are measured in
windows of the same prompt in which nothing overlaps (``engine/window_times.py``). The layer's own
combine and write (b) are no longer held up either, which the formula leaves out: with m + b for m,
and b for check, whose rows join right behind them, it is printed too. On the CPU alone both sides
share the cores: the formula describes a machine with a GPU, and there is no gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from strata.bench.arms import Arm
from strata.bench.layers import told
from strata.bench.protocol import Measured, compare
from strata.core.settings import SETTINGS, Settings
from strata.engine.calibrate import require_measured, wanted
from strata.engine.engine import Engine
from strata.engine.window_times import Sampling
from strata.experts.below_auto import Gain, Threshold, WindowTimes, choose_below, gain_of
from strata.window.run import WindowRunner

AUTO = SETTINGS["defer_cpu_below"].auto

LEAST = 0.01
"""Predicted gain from which its ratio to the measured one says anything."""

Write = Callable[[Any, int | None], object]
"""(variant, window size or None for drafts): writes some tokens of the first prompt."""


class Gains:
    """Predictions for the arms of one engine; thresholds of ``--defer-cpu-below auto`` come from
    the same windows.

    more: transformations in front of everything, such as a routing trace.
    """

    def __init__(self, engine: Engine, arms: Sequence[Arm], more: Sequence[Any] = ()) -> None:
        self._engine, self._more = engine, more
        self._asked = {arm.name: arm.over(engine.settings) for arm in arms}
        self._samplings: dict[int | None, Sampling] = {}
        self._times: WindowTimes | None = None
        self._behind: dict[int, float] = {}

    @property
    def wanted(self) -> bool:
        """Whether any arm defers."""
        return any(s.defer_cpu != "0" for s in self._asked.values())

    def measure(self, window: int | None, write: Write) -> list[str]:
        """Measure now, with windows of a fixed size or with drafts; fix the thresholds of this
        place and say what they are."""
        if not self.wanted:
            return []
        self._times = times = self._sampled(window, write)
        sampling = self._samplings[window]
        self._behind = {t.layer: sampling.behind_us(t.layer) for t in times.layers}
        threshold = choose_below(times)
        lines = [f"in turn: {_means(threshold)}, {len(times.layers)} layers that may be late"]
        if any(wanted(s) for s in self._asked.values()):
            late_below = self._engine.service.late_below
            sizes = range(1, self._engine.settings.spec + 1) if window is None else (window,)
            for size in sizes:
                of = times if window is not None else self._sampled(size, write)
                threshold = choose_below(of)
                late_below.fix(size, threshold.below)
                lines.append(threshold.line())
        return lines

    def _sampled(self, window: int | None, write: Write) -> WindowTimes:
        engine = self._engine
        runner: Any = engine.runner
        own = isinstance(runner, WindowRunner)
        if window not in self._samplings:
            asked = replace(engine.settings, defer_cpu="1", overlap="auto", defer_cpu_below=0.0,
                            defer_below_profile=None)  # fmt: skip
            name = f"in turn, windows of {window}"
            self._samplings[window] = Sampling(runner, asked, name, self._more)
        sampling = self._samplings[window]
        for _ in range(2):  # the first time warms up
            sampling.clear()
            with nullcontext() if own else told(runner, sampling.ran):
                write(sampling.variant, window)
        return require_measured(sampling.taken(window or 1))

    def of(self, arm: str) -> Gain | None:
        """What an arm should gain; None for arms that defer nothing."""
        asked = self._asked[arm]
        if self._times is None or asked.defer_cpu == "0":
            return None
        times = self._times
        if asked.defer_layers:
            chosen = tuple(t for t in times.layers if t.layer in asked.defer_layers)
            times = replace(times, layers=chosen)
        found = gain_of(times, self._below(asked))
        # the rows of check join in their own layer
        return replace(found, us=0.0) if asked.defer_cpu == "check" else found

    def with_combine_us(self, arm: str) -> float:
        """The same with b, microseconds a window."""
        asked, times = self._asked[arm], self._times
        assert times is not None
        chosen = asked.defer_layers or tuple(self._behind)
        check = asked.defer_cpu == "check"
        layers = tuple(
            replace(t, mixer_us=self._behind.get(t.layer, 0.0) + (0.0 if check else t.mixer_us))
            for t in times.layers
            if t.layer in chosen
        )
        return gain_of(replace(times, layers=layers), self._below(asked)).us

    def _below(self, asked: Settings) -> float:
        if asked.defer_cpu_below == AUTO:
            assert self._times is not None
            return self._engine.service.late_below.of(self._times.n_tokens)
        return asked.defer_cpu_below or math.inf

    def lines(self, result: Measured, base: str) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """A line for each arm that defers, and for each that is the base once more (how far equal
        arms differ); and the same as facts of its record."""
        lines: list[str] = []
        facts: dict[str, dict[str, Any]] = {}
        same = self._asked[base]
        for name, asked in self._asked.items():
            pairs = compare(result.of(base), result.of(name))
            if name == base or pairs is None:
                continue
            if asked == same:
                lines.append(f"noise floor, {name} against {base}: {pairs.line()}")
                facts[name] = {"noise_floor": vars(pairs)}
            found = self.of(name)
            if found is None:
                continue
            whole = result.ms_window(base)
            hoped = _gain(whole, found.us)
            most = _gain(whole, self.with_combine_us(name))
            ratio = pairs.gain / hoped if hoped >= LEAST else None
            text = (
                f"{name} against {base}: predicted {100 * hoped:+.1f} % ({found.us / 1e3:.2f} of "
                f"{whole:.2f} ms a window, {100 * found.late_share:.0f} % of the CPU's experts "
                f"late; {100 * most:+.1f} % with the combine), measured {pairs.line()}"
            )
            of_most = f", {pairs.gain / most:.2f} with the combine" if most >= LEAST else ""
            lines.append(text + (f", {ratio:.2f} of it" if ratio is not None else "") + of_most)
            facts[name] = {
                "predicted_gain": hoped,
                "predicted_with_combine": most,
                "predicted_ms_window": found.us / 1e3,
                "late_share": found.late_share,
                "below": None if math.isinf(found.below) else found.below,
                "measured_gain": vars(pairs),
                "measured_of_predicted": ratio,
            }
        return lines, facts

    def layers(self) -> list[dict[str, Any]]:
        """m, f and c of each layer as measured, microseconds a window, for the records."""
        if self._times is None:
            return []
        return [
            {
                "layer": t.layer,
                "m_us": t.mixer_us,
                "f_us": t.fast_us,
                "b_us": round(self._behind.get(t.layer, 0.0), 3),
                "c_us": t.cpu_us * sum(map(len, t.missed)) / max(1, len(t.missed)),
                "c_expert_us": t.cpu_us,
            }
            for t in self._times.layers
        ]


def _gain(whole_ms: float, saved_us: float) -> float:
    """Speed gained when so much of a window is saved."""
    return whole_ms / max(whole_ms - saved_us / 1e3, 1e-9) - 1


def _means(t: Threshold) -> str:
    return f"m {t.mixer_us:.0f}, f {t.fast_us:.0f}, c {t.cpu_us:.0f} us a layer"
