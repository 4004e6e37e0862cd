"""The speed protocol: several prompts, a fixed number of tokens each, several rounds; arms take
turns on every prompt.

One number per arm: the median over rounds of the mean decode speed of a round's prompts. The very
first answer of an engine is cold and stands apart. Arms are compared prompt by prompt in pairs,
with a bootstrap interval.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.bench.made_up_state import fill_state
from strata.bench.routing import Replay
from strata.core.errors import SettingError
from strata.core.types import Place
from strata.engine.draft import Drafter
from strata.engine.engine import Engine
from strata.engine.window_output import WindowOutput

COUNT_EVERY = 4
"""Experts are counted in every 4th window, outside the measured time."""


@dataclass(frozen=True)
class Plan:
    """rounds of every prompt with n_tokens each. window, accept: a fixed window size of which so
    many tokens are kept, instead of drafts (None: the engine's own drafting). made_up: prompts are
    not read, their state is drawn."""

    prompts: Sequence[Sequence[int]]
    n_tokens: int
    rounds: int
    window: int | None = None
    accept: int = 1
    made_up: bool = False


@dataclass
class Usage:
    """Experts by place, summed over counted windows: distinct ones, and rows."""

    windows: int = 0
    tokens: int = 0
    distinct: dict[Place, int] = field(default_factory=dict)
    rows: dict[Place, int] = field(default_factory=dict)

    def count(self, engine: Engine, layers: Sequence[int], n_tokens: int) -> None:
        """Look at the window that just ran."""
        self.windows += 1
        self.tokens += n_tokens
        for layer in layers:
            for place, groups in engine.service.of(layer).groups.items():
                self.distinct[place] = self.distinct.get(place, 0) + len(groups.expert_G)
                self.rows[place] = self.rows.get(place, 0) + groups.n_rows

    @property
    def hit_rate(self) -> float | None:
        """Share of distinct experts that were in the fast tier; None when none were used."""
        total = sum(self.distinct.values())
        return self.distinct.get(Place.FAST, 0) / total if total else None


@dataclass
class Run:
    """One prompt of one arm in one round. context: tokens in front of the first one written."""

    arm: str
    round: int
    prompt: int
    context: int
    tokens: int = 0
    seconds: float = 0.0
    windows: int = 0
    offered: int = 0
    accepted: int = 0
    text: tuple[int, ...] = ()

    @property
    def tokens_s(self) -> float:
        """Decode speed."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Measured:
    """All runs of some arms, and what they used."""

    runs: list[Run] = field(default_factory=list)
    cold: dict[str, Run] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
    prompt_tokens_s: list[float] = field(default_factory=list)

    def of(self, arm: str) -> list[Run]:
        """The warm runs of an arm."""
        return [run for run in self.runs if run.arm == arm]

    def per_round(self, arm: str) -> list[float]:
        """Mean speed of each round's prompts."""
        rounds: dict[int, list[float]] = {}
        for run in self.of(arm):
            rounds.setdefault(run.round, []).append(run.tokens_s)
        return [statistics.fmean(speeds) for _, speeds in sorted(rounds.items())]

    def speed(self, arm: str) -> float:
        """The protocol's number: tokens a second."""
        return statistics.median(self.per_round(arm))

    def ms_window(self, arm: str) -> float:
        """Mean milliseconds of a window."""
        runs = self.of(arm)
        return 1e3 * sum(r.seconds for r in runs) / max(1, sum(r.windows for r in runs))

    def tokens_window(self, arm: str) -> float:
        """Mean tokens that a window gave."""
        runs = self.of(arm)
        return sum(r.tokens for r in runs) / max(1, sum(r.windows for r in runs))


def require_room(n_tokens: int, context_tokens: int) -> None:
    """SettingError for a prompt and answer that the context does not hold."""
    if n_tokens > context_tokens:
        raise SettingError(
            f"prompt and answer take {n_tokens} tokens or more, the context holds "
            f"{context_tokens}; use --tokens N, or --context N if the model has more"
        )


class Decoder:
    """Writes tokens with one engine: greedy, never ended by an end token.

    The same prompt state serves every arm: it is read once per round and gone back to.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        make_drafter: Callable[[], Drafter],
        replay: Replay | None,
        layers: Sequence[int],
    ) -> None:
        self.engine, self.plan = engine, plan
        self.make_drafter, self.replay, self.layers = make_drafter, replay, layers
        self._for_prompts = engine.runner.variant

    def read(self, number: int) -> tuple[Any, Any, float]:
        """(logits after the prompt, a snapshot, tokens a second of reading)."""
        prompt = self.plan.prompts[number]
        self.engine.runner.variant = self._for_prompts
        self.engine.reset()
        start = time.perf_counter()
        if self.plan.made_up:
            fill_state(self.engine.state, prompt, number)
            row = np.zeros(self.engine.n_vocab, np.float32)
        else:
            row = self.engine.read_prompt(prompt)
        seconds = time.perf_counter() - start
        kept = self.engine.snapshot() if hasattr(self.engine.state, "snapshot") else None
        return row, kept, len(prompt) / seconds

    def write(
        self, variant: Any, run: Run, state: tuple[Any, Any], usage: Usage | None = None
    ) -> Run:
        """Fill a run from the prompt's state."""
        engine, plan = self.engine, self.plan
        row, snapshot = state
        if snapshot is None:  # a state that cannot be gone back to is made anew
            row, _, _ = self.read(run.prompt)
        else:
            engine.restore(snapshot)
        engine.runner.variant = variant
        prompt = plan.prompts[run.prompt]
        drafter = self.make_drafter()
        drafter.begin(prompt)
        text = [int(np.argmax(row))]
        drafter.extend(text)
        while run.tokens < plan.n_tokens:
            if self.replay is not None:
                self.replay.seek(run.prompt * plan.n_tokens + run.tokens)
            start = time.perf_counter()
            window, kept, picks = self._window(text, drafter, plan.n_tokens - run.tokens)
            run.seconds += time.perf_counter() - start
            run.windows += 1
            run.tokens += kept
            run.offered += len(window) - 1
            run.accepted += kept - 1
            text += picks
            if usage is not None and run.windows % COUNT_EVERY == 1:
                usage.count(engine, self.layers, len(window))
        run.text = tuple(text)
        return run

    def _window(
        self, text: list[int], drafter: Drafter, most: int
    ) -> tuple[list[int], int, list[int]]:
        """One window: (its tokens, how many were kept, what it picked)."""
        engine, plan = self.engine, self.plan
        if plan.window is not None:
            size, keep = min(plan.window, most), min(plan.accept, most)
            window = [text[-1], *_fillers(text[-1], size - 1, engine.n_vocab)]
            output = engine.verify(window)
            picks = [_highest(output, place) for place in range(keep)]
            engine.commit(keep)
            return window, keep, picks
        drafts = list(drafter.propose(min(engine.settings.spec, most) - 1)) if most > 1 else []
        window = [text[-1], *drafts]
        output = engine.verify(window)
        picks = []
        for place in range(len(window)):
            picks.append(_highest(output, place))
            if place >= len(drafts) or drafts[place] != picks[-1]:
                break
        engine.commit(len(picks))
        drafter.extend(picks)
        return window, len(picks), picks


def _highest(output: WindowOutput, place: int) -> int:
    """The greedy pick; a row that is not finite is refused by the commit."""
    best = output.greedy(place)
    return int(np.argmax(output.row(place))) if best is None else best


def _fillers(token: int, n: int, n_vocab: int) -> list[int]:
    return [(token * 31 + 17 * (i + 1)) % n_vocab for i in range(n)]


def measure_arms(
    decoder: Decoder,
    variants: dict[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Every arm on every prompt in every round, taking turns; the order turns around from prompt to
    prompt, so that none always follows the other."""
    result = Measured(usage={name: Usage() for name in variants})
    names, plan = list(variants), decoder.plan
    row, snapshot, _ = decoder.read(0)
    for name in names:
        cold = Run(name, -1, 0, len(plan.prompts[0]))
        result.cold[name] = decoder.write(variants[name], cold, (row, snapshot))
    for number in range(plan.rounds):
        for prompt in range(len(plan.prompts)):
            row, snapshot, speed = decoder.read(prompt)
            result.prompt_tokens_s.append(speed)
            turned = names if (number + prompt) % 2 == 0 else names[::-1]
            for name in turned:
                run = Run(name, number, prompt, len(plan.prompts[prompt]))
                state = (row, snapshot)
                result.runs.append(decoder.write(variants[name], run, state, result.usage[name]))
        say(f"round {number + 1} of {plan.rounds}: " + ", ".join(
            f"{name} {result.per_round(name)[-1]:.2f} tok/s" for name in names))  # fmt: skip
    return result


@dataclass(frozen=True)
class Pairs:
    """Speed of an arm over another on the same prompts: the median ratio less 1, and its bootstrap
    interval of 95 %."""

    gain: float
    low: float
    high: float
    n: int

    def line(self) -> str:
        """For people."""
        return f"{100 * self.gain:+.1f} % ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


def compare(base: Sequence[Run], other: Sequence[Run], seed: int = 0) -> Pairs | None:
    """Paired by round and prompt; None when nothing pairs. Prompts are drawn anew, not rounds,
    because the rounds of a prompt are alike."""
    at = {(run.round, run.prompt): run.tokens_s for run in base}
    ratios: dict[int, list[float]] = {}
    for run in other:
        key = (run.round, run.prompt)
        if at.get(key) and run.tokens_s:
            ratios.setdefault(run.prompt, []).append(run.tokens_s / at[key])
    if not ratios:
        return None
    groups = [np.asarray(values) for values in ratios.values()]
    rng = np.random.default_rng(seed)
    draws = [
        np.median(np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))]))
        for _ in range(1000)
    ]
    low, high = np.percentile(draws, [2.5, 97.5])
    middle = float(np.median(np.concatenate(groups)))
    return Pairs(middle - 1, float(low) - 1, float(high) - 1, sum(map(len, groups)))
