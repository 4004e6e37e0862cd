"""strata bench: decode speed of arms, by the protocol of ``bench/protocol.py``, with what it takes
to judge it: bytes and the share of the limit, hit rates, layers, memory, settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from strata.bench.arms import Arm, variant_of, with_steps
from strata.bench.facts import Costs, facts_of, limits
from strata.bench.gains import Gains
from strata.bench.layers import WindowTime, layer_lines, time_layers
from strata.bench.machine import VramPeak, measure_bandwidths
from strata.bench.placed import AT, Asked, forecast
from strata.bench.predict import Prediction, planned_slots
from strata.bench.prompts import SHORT, long_text, monotony, random_prompt
from strata.bench.protocol import Decoder, Plan, Run, measure_arms, require_room
from strata.bench.report import Record, record_of
from strata.bench.routing import (
    Ids,
    Locality,
    Replay,
    load_trace,
    made_up_trace,
    measured,
    moe_layers,
    require_fit,
)
from strata.bench.sweep import Phases, Slots, require_no_swaps, settle
from strata.bench.traffic import traffic_of
from strata.core.errors import SettingError
from strata.core.settings_load import Effective
from strata.engine.build import prepare
from strata.engine.checkpoint_plan import understand
from strata.engine.draft import build_drafter
from strata.engine.machine import probe
from strata.engine.model import Model, load_effective
from strata.engine.off_here import require_arm
from strata.models.spec import ModelSpec, MoeSpec
from strata.models.synthetic import cut_down, is_synthetic, open_model

Say = Callable[[str], None]
RANDOM_PROMPT_TOKENS = 200
TRACE_TOKENS = 512
TIMED_TOKENS = 24


@dataclass(frozen=True)
class Options:
    """What to measure. prompts, tokens, rounds: of the protocol. long_tokens: 0, or the length of
    three long prompts instead of the short ones. windows, accept: fixed window sizes and how many
    of its tokens are kept. locality or trace: experts come from a trace instead of the router.
    slots: sizes of the fast tier, threads: numbers of workers, one after the other on one engine;
    () is the setting's. at: lengths of sequences with a made-up state, instead of prompts that are
    read. predict: say before loading what windows of one token will do (``bench/placed.py``)."""

    model: str
    arms: Sequence[Arm]
    fresh: bool = False
    prompts: int = len(SHORT)
    tokens: int = 200
    rounds: int = 3
    long_tokens: int = 0
    windows: tuple[int, ...] = ()
    accept: int = 1
    locality: Locality | None = None
    trace: Path | None = None
    layers: bool = True
    slots: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    predict: bool = False


@dataclass(frozen=True)
class Cell:
    """Conditions of one table."""

    slots: int | None = None
    threads: int | None = None
    at: int | None = None
    window: int | None = None

    def title(self, options: Options) -> str:
        """What differs from the other tables of a call; "" when there is one only."""
        parts = (
            (f"{self.slots} experts in the fast tier", self.slots is not None),
            (f"{self.threads} CPU threads", self.threads is not None),
            (f"at {self.at} tokens", self.at is not None),
            (f"windows of {self.window}", len(options.windows) > 1),
        )
        return ", ".join(text for text, told in parts if told)


@dataclass
class Outcome:
    """Records of all arms and lines for people."""

    records: list[Record] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def run_speed(
    options: Options,
    asked: Effective,
    say: Say,
    keep: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Measure all arms. Errors as for loading, and SettingError for arms that cannot be had. keep:
    given what there is after every table, so that nothing is lost when the rest fails."""
    asked = _with_room(options, asked)
    checkpoint = open_model(options.model)
    try:
        plan = understand(checkpoint)
        traffic = traffic_of(plan)
    finally:
        checkpoint.close()
    groups = list(_groups(options, asked))
    if options.slots:
        require_no_swaps(asked.settings.adapt_swaps)
    for arm in options.arms:
        settings = require_arm(arm.name, arm.asked(asked), plan.spec, plan.n_pairs)
        require_room(1 + options.tokens, settings.context)
    trace = _trace(options, plan.spec)
    if trace is not None:
        require_fit(plan.spec, moe_layers(plan.spec), trace)
    # before a model fills the GPU's memory
    machine = probe()
    workers = asked.settings.workers or machine.cpu_cores
    wanted = asked.settings.device
    on_gpu = wanted == "cuda" or (wanted == "auto" and machine.gpu is not None)
    bandwidths = measure_bandwidths(workers, "cuda" if on_gpu else "cpu")
    say(bandwidths.line())
    if what := cut_down(options.model):
        say(f"NOT THE WHOLE MODEL: {what}; no figure below is the model's")
    predicted = _predicted(options, asked, say) if options.predict else {}
    outcome = Outcome()
    for arms in groups:
        base = asked if len(arms) > 1 else arms[0].asked(asked)
        for load in _loads(options, base, on_gpu):
            phases = Phases()
            with load_effective(options.model, load, phases) as model:
                phases.end()
                say(phases.line())
                costs = Costs(traffic, bandwidths)
                measuring = _Measuring(options, arms, model, costs, outcome, say, trace)
                measuring.predicted = predicted
                for cell in _cells(options, on_gpu, model.settings.workers):
                    measuring.run(cell)
                    for record in outcome.records:
                        record.setdefault("load_s", phases.seconds)
                    keep(outcome)
    return outcome


def _predicted(options: Options, asked: Effective, say: Say) -> dict[int | None, Prediction]:
    """For each size of the fast tier, or for the one that is loaded."""
    ready = prepare(options.model, asked)
    try:
        slots = list(options.slots) or [planned_slots(ready)]
        at = options.at[0] if options.at else AT
        wanted = Asked(slots, options.locality or Locality(), at)
        found = forecast(ready, asked, wanted, say)
    finally:
        ready.plan.checkpoint.close()
    if len(found) < len(slots):  # on the CPU the fast tier is no faster
        found *= len(slots)
    for n, prediction in zip(slots, found, strict=True):
        say(f"{n} experts in the fast tier, {prediction.lines()[0]}")
    return dict(zip(options.slots or (None,), found, strict=True))


def _loads(options: Options, base: Effective, on_gpu: bool) -> Iterator[Effective]:
    """On the CPU everything runs in the pool, so each number of threads needs a load."""
    if options.slots:  # with the most of them: whether they fit is known at once
        sources = {**base.sources, "expert_cache": "--slots"}
        base = Effective(replace(base.settings, expert_cache=max(options.slots)), sources)
    if on_gpu or not options.threads:
        yield base
        return
    for n in options.threads:
        sources = {**base.sources, "workers": "--threads"}
        yield Effective(replace(base.settings, workers=n), sources)


def _cells(options: Options, on_gpu: bool, workers: int) -> Iterator[Cell]:
    here = (workers,) if options.threads and not on_gpu else options.threads
    for slots in options.slots or (None,):
        for threads in here or (None,):
            for at in options.at or (None,):
                for window in options.windows or (None,):
                    yield Cell(slots, threads, at, window)


def _groups(options: Options, asked: Effective) -> Iterator[Sequence[Arm]]:
    """Arms that share an engine. Their settings are checked before anything is loaded."""
    for arm in options.arms:
        arm.asked(asked)
    bound = [arm for arm in options.arms if arm.needs_engine]
    if bound and not options.fresh and len(options.arms) > 1:
        raise SettingError(
            f"arm {bound[0].name} changes {', '.join(bound[0].needs_engine)}, which is fixed when "
            f"a model is loaded; add --fresh for an engine per arm"
        )
    if options.fresh or bound:
        yield from ([arm] for arm in options.arms)
    else:
        yield options.arms


def _with_room(options: Options, asked: Effective) -> Effective:
    """A context that holds prompt and answer, where none was asked for."""
    longest = max(options.long_tokens, *options.at, 0)
    need = longest + options.tokens + TIMED_TOKENS + 16
    if not longest or asked.asked("context"):
        return asked
    sources = {**asked.sources, "context": "--at" if options.at else "--long"}
    return Effective(replace(asked.settings, context=need), sources)


class _Measuring:
    """All arms of one engine."""

    def __init__(
        self,
        options: Options,
        arms: Sequence[Arm],
        model: Model,
        costs: Costs,
        outcome: Outcome,
        say: Say,
        trace: Ids | None,
    ) -> None:
        self._options, self._arms, self._model = options, arms, model
        self._costs, self._outcome, self._say = costs, outcome, say
        self.predicted: Mapping[int | None, Prediction] = {}
        engine, device = model.engine, torch.device(model.settings.device)
        self._trace = trace
        self._replay = None
        if self._trace is not None:
            self._replay = Replay(engine.spec, self._trace, engine.runner.network.device)
            told = ", ".join(f"{k} {v:.2f}" for k, v in measured(self._trace).items())
            say(f"routing trace: {told}")
        self._device = device.type
        self._slots = Slots(engine) if options.slots else None
        # one engine of its own has the arm's settings already
        plain = [Arm(arm.name, {}) if len(arms) == 1 else arm for arm in arms]
        before = [] if self._replay is None else [self._replay]
        self._gains = Gains(engine, plain, before)
        self._variants: dict[str, Any] = {}
        for arm in plain:
            made = variant_of(engine, arm)
            self._variants[arm.name] = with_steps(made, f"{made.name}+", *before)

    def run(self, cell: Cell) -> None:
        """One table: the conditions of ``cell``."""
        options, engine = self._options, self._model.engine
        if cell.threads is not None and self._device == "cuda":
            use_workers: Callable[[int], None] | None = getattr(engine.runner, "use_workers", None)
            assert use_workers is not None
            use_workers(cell.threads)
        if cell.slots is not None and self._slots is not None:
            self._slots.resize(cell.slots)
        decoder = self._decoder(cell)
        title = cell.title(options)
        if title:
            self._say(f"{title}:")
        settled = settle(decoder, self._variants, self._say)
        short = self._write_some(decoder)
        said = self._gains.measure(cell.window, short)
        self._say_all(said)
        with VramPeak(self._device) as vram:
            result = measure_arms(decoder, self._variants, self._say)
        lines, gains = self._gains.lines(result, self._arms[0].name)
        self._outcome.lines += [f"{title}:"] if title and (lines or options.layers) else []
        for arm in self._arms:
            asked = _asked(options, self._model.settings.spec)
            facts = facts_of(self._model, self._costs, self._trace) | asked
            bytes_of, line = limits(result, arm.name, self._costs, self._model)
            facts |= bytes_of | {"arm_settings": dict(arm.changes), "settling_windows": settled}
            facts |= {"vram_peak_bytes": vram.n_bytes, "vram_peak_by": vram.source}
            facts |= {"cell": title, **vars(cell), **gains.get(arm.name, {})}
            facts["workers"] = cell.threads or facts["workers"]
            facts["in_turn"] = self._gains.layers()
            times = self._times(arm.name, short, cell)
            if times is not None:
                facts["layers"] = [vars(t) for t in times.layers]
                self._outcome.lines += [f"{arm.name}: {line}", *layer_lines(times)]
            prediction = self.predicted.get(cell.slots)
            if prediction is not None and not arm.changes and cell.window == 1:
                record_s = result.ms_window(arm.name) / 1e3
                facts["predicted_ms_window"] = 1e3 * prediction.window_s
                facts["predicted_off"] = prediction.window_s / record_s - 1
                self._outcome.lines.append(
                    f"predicted {prediction.tokens_s:.1f} tok/s from slices, measured "
                    f"{1 / record_s:.1f}: {prediction.window_s / record_s - 1:+.1%} of its time off"
                )
            self._outcome.records.append(record_of(result, arm.name, facts))
        self._outcome.lines += lines
        if lines and self._device == "cpu":
            self._outcome.lines.append(
                "(on the CPU both sides share the cores: there is nothing to overlap)"
            )
        if vram.n_bytes:
            self._outcome.lines.append(f"VRAM peak {vram.n_bytes / 2**30:.2f} GiB ({vram.source})")

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(line)

    def _decoder(self, cell: Cell) -> Decoder:
        options, model = self._options, self._model
        plan = Plan(
            _prompts(options, model, cell.at, self._say), options.tokens, options.rounds,
            cell.window, min(options.accept, cell.window or 1), cell.at is not None,
        )  # fmt: skip
        layers = moe_layers(model.engine.spec)
        return Decoder(
            model.engine, plan, lambda: build_drafter(model.settings), self._replay, layers
        )

    def _write_some(self, decoder: Decoder) -> Callable[[Any, int | None], None]:
        """Windows of a variant on the first prompt, outside the measured runs."""
        prompt, engine = decoder.plan.prompts[0], decoder.engine
        kept: list[Any] = []

        def write(variant: Any, window: int | None) -> None:
            if not kept or engine.tokens[: len(prompt)] != prompt:
                kept[:] = decoder.read(0)[:2]
            n_tokens = min(TIMED_TOKENS, self._options.tokens)
            accept = min(decoder.plan.accept, window or 1)
            plan = replace(decoder.plan, n_tokens=n_tokens, window=window, accept=accept)
            short = Decoder(engine, plan, decoder.make_drafter, decoder.replay, decoder.layers)
            short.write(variant, Run(variant.name, -2, 0, len(prompt)), (kept[0], kept[1]))

        return write

    def _times(
        self, arm: str, write: Callable[[Any, int | None], None], cell: Cell
    ) -> WindowTime | None:
        """Layers of a few windows."""
        if not self._options.layers:
            return None
        engine = self._model.engine
        return time_layers(engine, self._variants[arm], lambda timed: write(timed, cell.window))


def _prompts(options: Options, model: Model, at: int | None, say: Say) -> list[list[int]]:
    text = not is_synthetic(options.model) and _has_text(model)
    n_vocab, long = model.engine.n_vocab, options.long_tokens
    found: list[list[int]] = []
    for number in range(3 if long else options.prompts):
        if at is not None:
            found.append(random_prompt(at, n_vocab, number))
        elif not text:
            found.append(random_prompt(long or RANDOM_PROMPT_TOKENS, n_vocab, number))
        elif long:
            found.append(model.tokenizer.encode(long_text(long, number))[:long])
        else:
            words = SHORT[number % len(SHORT)]
            asked = [{"role": "user", "content": words}] if model.chats else words
            found.append(model.prompt_tokens(asked))
    most = max(map(len, found)) + options.tokens
    require_room(most, model.engine.context_tokens)
    for warning in dict.fromkeys(filter(None, map(monotony, found))):
        say(f"warning: {warning}")
    return found


def _has_text(model: Model) -> bool:
    return not any(line.startswith("text in and out: off") for line in model.report)


def _trace(options: Options, spec: ModelSpec) -> Ids | None:
    if options.trace is not None:
        return load_trace(options.trace)
    if options.locality is None:
        return None
    layers = moe_layers(spec)
    if not layers:
        raise SettingError(f"--locality: {spec.family} has no routed experts to trace")
    ffn = spec.layers[layers[0]].ffn
    assert isinstance(ffn, MoeSpec)
    return made_up_trace(len(layers), ffn.n_experts, ffn.n_active, TRACE_TOKENS, options.locality)


def _asked(options: Options, spec: int) -> Record:
    return {
        "model": options.model,
        "window": [*options.windows, options.accept] if options.windows else spec,
        "tokens": options.tokens,
        "cut_down": cut_down(options.model),
    }
