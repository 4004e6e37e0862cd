"""Finds the fastest setting whose measured change of the output stays within a budget.

Speeds come first, of every candidate in turns; then the change of every lossy candidate that is
faster than the exact engine (the others cannot win). What was measured becomes a profile that
``--quality-budget`` chooses from.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from strata.core.errors import InputError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.engine.calibrate import measure_windows, tokens_for
from strata.engine.draft import build_drafter
from strata.engine.engine import Engine
from strata.engine.model import Model
from strata.engine.session import Session
from strata.engine.tuned import WORST_BUCKET, Point
from strata.experts.below_auto import WindowTimes, choose_below
from strata.formats.tokenizer import Tokenizer
from strata.quality.arms import Arm, scale_rank, tokenizer_or_none, use_variant
from strata.quality.measure import Progress, Reference, measure_arm, read_reference
from strata.quality.scores import ArmResult
from strata.quality.texts import Text

WINDOWS = (1, 2, 4)
QUANTILES = (0.5, 0.7)
"""Shares of the missed experts that the fixed thresholds leave late."""

SHARES = ("0.1", "0.2", "0.35", "0.5")
"""PCIe shares that are tried on a GPU, behind the choice of everything else."""

PROMPT_TOKENS, DECODED_TOKENS, ROUNDS = 64, 48, 3

Speed = Callable[[Engine, Settings, Text], float]
"""Decode tokens/s of an engine whose windows run by the settings, continuing the text's start."""


@dataclass
class Tuner:
    """What to try and how long to measure. speed: instead of a greedy continuation of the
    texts."""

    texts: Sequence[Text]
    budget: float
    windows: Sequence[int] = WINDOWS
    progress: Progress | None = None
    speed: Speed | None = None
    rounds: int = ROUNDS
    skipped: dict[str, str] = field(default_factory=dict)
    """Candidates that were not compared with the reference, and why."""

    def run(self, model: Model) -> list[Point]:
        """Every candidate's point, fastest first. SettingError when the budget allows nothing but
        what this leaves out."""
        engine, base = model.engine, model.settings
        require_tunable(engine.runner.network.n_active, self.texts, engine.context_tokens)
        arms = [
            (window, arm)
            for window in self.windows
            for arm in candidates(engine, base, window)
        ]  # fmt: skip
        speeds = self._speeds(engine, base, arms)
        exact = max(statistics.median(speeds[w, arm.name]) for w, arm in arms if not arm.overrides)
        points: list[Point] = []
        for window in self.windows:
            points += self._window(engine, base, [a for w, a in arms if w == window],
                                   window, speeds, exact)  # fmt: skip
        return sorted(points, key=lambda p: -p.tokens_s)

    def shares(self, best: Point, opener: Callable[[str], Model]) -> list[Point]:
        """The best point with each PCIe share, for a GPU: results are equal, so only speed is
        measured. opener: loads the model with a share (text form); closed here."""
        measure, found = self.speed or decode_speed, []
        for n, share in enumerate(SHARES):
            with opener(share) as model:
                lossy = {k: v for k, v in best.settings.items() if k != "spec"}
                window = int(best.settings.get("spec", 1))
                settings = _with_window(Arm(best.name, lossy).settings(model.settings), window)
                use_variant(model.engine, settings, window)
                speeds = [
                    measure(model.engine, settings, self.texts[i % len(self.texts)])
                    for i in range(self.rounds)
                ]
            point = replace(
                best,
                settings={**best.settings, "pcie_frac": share},
                tokens_s=statistics.median(speeds),
                spread=max(speeds) - min(speeds),
            )
            found.append(point)
            if self.progress is not None:
                self.progress("PCIe share", n + 1, len(SHARES))
        return found

    def _speeds(
        self, engine: Engine, base: Settings, arms: Sequence[tuple[int, Arm]]
    ) -> dict[tuple[int, str], list[float]]:
        """tokens/s of each arm in each round; arms take turns, so that a slow minute hits all."""
        measure, n = self.speed or decode_speed, 0
        found: dict[tuple[int, str], list[float]] = {(w, arm.name): [] for w, arm in arms}
        for round_ in range(self.rounds):
            text = self.texts[round_ % len(self.texts)]
            for window, arm in arms:
                settings = _with_window(arm.settings(base), window)
                use_variant(engine, settings, window)
                found[window, arm.name].append(measure(engine, settings, text))
                n += 1
                if self.progress is not None:
                    self.progress("speed", n, self.rounds * len(arms))
        return found

    def _window(
        self,
        engine: Engine,
        base: Settings,
        arms: Sequence[Arm],
        window: int,
        speeds: Mapping[tuple[int, str], list[float]],
        exact_tokens_s: float,
    ) -> list[Point]:
        """Points of one window size; one reference for all of them."""
        points = []
        worth = []
        for arm in arms:
            speed = statistics.median(speeds[window, arm.name])
            if not arm.overrides:
                points.append(_point(arm, window, speeds[window, arm.name], None))
            elif speed <= exact_tokens_s:
                name = f"{arm.name}, windows of {window}"
                self.skipped[name] = f"{speed:.1f} tokens/s, not faster than exact"
            elif self.budget == 0:
                self.skipped[f"{arm.name}, windows of {window}"] = "a budget of 0 is exact"
            else:
                worth.append(arm)
        if worth:
            n = sum(len(text.tokens) for text in self.texts)
            with Reference(n, engine.n_vocab) as reference:
                use_variant(engine, base, window)
                read_reference(engine, self.texts, window, reference, self.progress)
                for arm in worth:
                    result = measure_arm(
                        engine, arm, arm.settings(base), self.texts, window, reference,
                        progress=self.progress,
                    )  # fmt: skip
                    points.append(_point(arm, window, speeds[window, arm.name], result))
        return points


def candidates(engine: Engine, base: Settings, window: int) -> list[Arm]:
    """What is tried at a window size: exact; deferral of all rows, by the automatic threshold and
    by fixed ones, plain and with repair; route tail skip; and both together."""
    arms = [Arm("exact")]
    thresholds = _thresholds(engine, base, window)
    for mode in ("1", "repair"):
        arms += [_deferred(mode, below) for below in (0.0, *thresholds)]
    n_active = engine.runner.network.n_active
    for rank in sorted({scale_rank(n_active), max(n_active - 1, 1)}):
        arms.append(Arm(f"skip {rank}", {"route_tail_skip": str(rank)}))
    if thresholds:
        both = _deferred("repair", thresholds[0])
        last = str(max(n_active - 1, 1))
        overrides = {**both.overrides, "route_tail_skip": last}
        arms.append(Arm(f"{both.name} skip {last}", overrides))
    return [arm for arm in arms if _possible(engine, arm, base)]


def require_tunable(n_experts: int, texts: Sequence[Text], context_tokens: int) -> None:
    """SettingError for a model without routed experts, InputError for a text whose beginning leaves
    no room to decode."""
    if not n_experts:
        raise SettingError("this model has no routed experts, so there is nothing to tune")
    for text in texts:
        n_prompt = min(len(text.tokens), PROMPT_TOKENS)
        if context_tokens - n_prompt < 2:
            raise InputError(f"{text.name}: no room to decode behind {n_prompt} tokens of prompt")


def decode_speed(engine: Engine, settings: Settings, text: Text) -> float:
    """Tokens/s after the first of a greedy continuation of a text's beginning."""
    drafter = build_drafter(settings)
    session = Session(engine, drafter, _Silent, (), settings.spec)
    prompt = list(text.tokens[:PROMPT_TOKENS])
    count = min(DECODED_TOKENS, engine.context_tokens - len(prompt))
    answer = session.answer(prompt, settings.for_request(temperature=0, max_tokens=count))
    try:
        for _ in answer:
            pass
    finally:
        session.forget()
    return answer.report.decode_tokens_s


def tune_lines(points: Sequence[Point], budget: float, skipped: Mapping[str, str]) -> list[str]:
    """The table, fastest first: what no other point beats in both is marked ``*``, what the budget
    allows ``ok``; the choice, and what was left out."""
    best = choice(points, budget)
    widths = max(len(p.name) for p in points)
    lines = [f"{'':2} {'setting':<{widths}}  tokens/s  spread  mean KL  worst KL   top-1"]
    for p in points:
        mark = "*" if pareto(p, points) else " "
        ok = "ok" if p.within(budget) else ""
        lines.append(
            f"{mark:2} {p.name:<{widths}}  {p.tokens_s:8.2f}  {p.spread:6.2f}  {p.kl:7.4f}  "
            f"{p.worst_kl:8.4f}  {100 * p.top1:5.2f}%  {ok}".rstrip()
        )
    lines.append("*: nothing measured is both faster and closer to exact")
    exact = max(p.tokens_s for p in points if p.kl == 0)
    lines.append(
        f"within a budget of {budget:g} (mean; {WORST_BUCKET * budget:g} in the worst bucket): "
        f"{best.name}, {best.tokens_s:.2f} tokens/s, {100 * (best.tokens_s / exact - 1):+.1f} % "
        f"against exact"
    )
    return lines + [f"not compared: {name}: {why}" for name, why in skipped.items()]


def choice(points: Sequence[Point], budget: float) -> Point:
    """The fastest point within the budget; an exact one is always among them."""
    return max((p for p in points if p.within(budget)), key=lambda p: p.tokens_s)


def pareto(point: Point, points: Sequence[Point]) -> bool:
    """Whether no other point is at least as good in both and better in one."""
    return not any(
        (other.tokens_s >= point.tokens_s and other.kl <= point.kl)
        and (other.tokens_s > point.tokens_s or other.kl < point.kl)
        for other in points
    )


def timestamp() -> str:
    """Date and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


class _Silent:
    """A decoder for measurements: no text."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _deferred(mode: str, below: float) -> Arm:
    overrides: dict[str, Any] = {"defer_cpu": mode}
    if below:
        overrides["defer_cpu_below"] = f"{below:g}"
    return Arm(" ".join(["defer" if mode == "1" else mode, *([f"{below:g}"] if below else [])]),
               overrides)  # fmt: skip


def _thresholds(engine: Engine, base: Settings, window: int) -> list[float]:
    """The automatic threshold first, then those that leave the QUANTILES late; without those that
    defer nothing or everything."""
    tokenizer: Tokenizer | None = tokenizer_or_none(engine)
    runner = engine.runner
    deferred = replace(base, defer_cpu="1")
    times = measure_windows(runner, deferred, window, tokens_for(runner, tokenizer))
    found = [choose_below(times).below, *_quantiles(times)]
    able = (round(x, 4) for x in found if 0 < x < math.inf)
    return list(dict.fromkeys(able))


def _quantiles(times: WindowTimes) -> Iterator[float]:
    shares = [s for layer in times.layers for window in layer.missed for s in window]
    if shares:
        yield from (float(np.quantile(shares, q)) for q in QUANTILES)


def _possible(engine: Engine, arm: Arm, base: Settings) -> bool:
    """Whether the model can have all of it."""
    try:
        return not use_variant(engine, arm.settings(base)).off
    except SettingError:
        return False


def _with_window(settings: Settings, window: int) -> Settings:
    return replace(settings, spec=window, draft="none" if window == 1 else "lookup")


def _point(arm: Arm, window: int, speeds: Sequence[float], result: ArmResult | None) -> Point:
    settings = {name: str(value) for name, value in arm.overrides.items()}
    if window != SETTINGS["spec"].default:
        settings["spec"] = str(window)
    return Point(
        settings,
        statistics.median(speeds),
        max(speeds) - min(speeds),
        0.0 if result is None else result.all.kl_top,
        0.0 if result is None else max(bucket.kl_top for bucket in result.buckets),
        1.0 if result is None else result.all.top1,
    )
