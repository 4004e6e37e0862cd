"""strata bench: decode speed of arms, by the protocol of ``bench/protocol.py``, with what it takes
to judge it: bytes and the share of the limit, hit rates, layers, memory, settings.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from strata import __version__
from strata.bench.arms import Arm, variant_of, with_steps
from strata.bench.layers import WindowTime, late_layers, layer_lines, time_layers
from strata.bench.machine import Bandwidths, VramPeak, measure_bandwidths
from strata.bench.prompts import SHORT, long_text, monotony, random_prompt
from strata.bench.protocol import Decoder, Measured, Plan, Run, compare, measure_arms
from strata.bench.report import Record, record_of
from strata.bench.routing import (
    Ids,
    Locality,
    Replay,
    load_trace,
    made_up_trace,
    measured,
    moe_layers,
)
from strata.bench.traffic import Traffic, limit_of, traffic_of
from strata.core.errors import SettingError
from strata.core.settings import SETTINGS
from strata.core.settings_load import Effective
from strata.engine.checkpoint_plan import understand
from strata.engine.draft import build_drafter
from strata.engine.machine import probe
from strata.engine.model import Model, load_effective
from strata.models.spec import ModelSpec, MoeSpec
from strata.models.synthetic import is_synthetic, open_model

Say = Callable[[str], None]
RANDOM_PROMPT_TOKENS = 200
TRACE_TOKENS = 512
TIMED_TOKENS = 24


@dataclass(frozen=True)
class Options:
    """What to measure. prompts, tokens, rounds: of the protocol. long_tokens: 0, or the length of
    three long prompts instead of the short ones. windows, accept: fixed window sizes and how many
    of its tokens are kept. locality or trace: experts come from a trace instead of the router."""

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


@dataclass(frozen=True)
class Costs:
    """What the model moves, and what the machine can."""

    traffic: Traffic
    bandwidths: Bandwidths


@dataclass
class Outcome:
    """Records of all arms and lines for people."""

    records: list[Record] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def run_speed(options: Options, asked: Effective, say: Say) -> Outcome:
    """Measure all arms. Errors as for loading, and SettingError for arms that cannot be had."""
    asked = _with_room(options, asked)
    checkpoint = open_model(options.model)
    try:
        traffic = traffic_of(understand(checkpoint))
    finally:
        checkpoint.close()
    # before a model fills the GPU's memory
    machine = probe()
    workers = asked.settings.workers or machine.cpu_cores
    wanted = asked.settings.device
    on_gpu = wanted == "cuda" or (wanted == "auto" and machine.gpu is not None)
    bandwidths = measure_bandwidths(workers, "cuda" if on_gpu else "cpu")
    say(bandwidths.line())
    outcome = Outcome()
    for arms in _groups(options, asked):
        base = asked if len(arms) > 1 else arms[0].asked(asked)
        with load_effective(options.model, base) as model:
            costs = Costs(traffic, bandwidths)
            for window in options.windows or (None,):
                _measure(options, window, arms, model, costs, outcome, say)
    return outcome


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
    need = options.long_tokens + options.tokens + 16
    if not options.long_tokens or asked.asked("context"):
        return asked
    sources = {**asked.sources, "context": "--long"}
    return Effective(replace(asked.settings, context=need), sources)


def _measure(
    options: Options,
    window: int | None,
    arms: Sequence[Arm],
    model: Model,
    costs: Costs,
    outcome: Outcome,
    say: Say,
) -> None:
    """All arms of one engine, in windows of one fixed size or with drafts."""
    engine, device = model.engine, model.settings.device
    plan = Plan(
        _prompts(options, model, say), options.tokens, options.rounds, window,
        min(options.accept, window or 1),
    )  # fmt: skip
    trace = _trace(options, engine.spec)
    replay = None
    if trace is not None:
        replay = Replay(engine.spec, trace, _device(device))
        say("routing trace: " + ", ".join(f"{k} {v:.2f}" for k, v in measured(trace).items()))
    layers = moe_layers(engine.spec)
    decoder = Decoder(engine, plan, lambda: build_drafter(model.settings), replay, layers)
    variants = {}
    for arm in arms:
        # one engine of its own has the arm's settings already
        plain = Arm(arm.name, {}) if len(arms) == 1 else arm
        made = variant_of(engine, plain)
        variants[arm.name] = with_steps(made, f"{made.name}+trace", replay) if replay else made
    with VramPeak(device) as vram:
        result = measure_arms(decoder, variants, say)
    for arm in arms:
        times = _times(options, decoder, variants[arm.name], result, arm.name)
        facts = _facts(options, model, costs, trace)
        facts |= _limits(result, arm.name, costs, device)
        facts |= {"arm_settings": dict(arm.changes), "vram_peak_bytes": vram.n_bytes}
        if times is not None:
            facts["layers"] = [vars(t) for t in times.layers]
            size = f", windows of {window}" if window else ""
            outcome.lines += [f"{arm.name}{size}:", *layer_lines(times)]
        record = record_of(result, arm.name, facts)
        if len(options.windows) > 1:
            record["arm"] += f" w{window}"
        outcome.records.append(record)
        outcome.lines += _gain_lines(engine.spec, arms, arm, times, result, device)
    if vram.n_bytes:
        outcome.lines.append(f"VRAM peak {vram.n_bytes / 2**30:.2f} GiB ({vram.source})")


def _device(name: str) -> torch.device:
    return torch.device(name)


def _prompts(options: Options, model: Model, say: Say) -> list[list[int]]:
    text = not is_synthetic(options.model) and _has_text(model)
    n_vocab, long = model.engine.n_vocab, options.long_tokens
    found: list[list[int]] = []
    for number in range(3 if long else options.prompts):
        if not text:
            found.append(random_prompt(long or RANDOM_PROMPT_TOKENS, n_vocab, number))
        elif long:
            found.append(model.tokenizer.encode(long_text(long, number))[:long])
        else:
            words = SHORT[number % len(SHORT)]
            asked = [{"role": "user", "content": words}] if model.chats else words
            found.append(model.prompt_tokens(asked))
    most = max(map(len, found)) + options.tokens
    if most > model.engine.context_tokens:
        raise SettingError(
            f"prompt and answer take {most} tokens, the context holds "
            f"{model.engine.context_tokens}; use --tokens N, or --context N if the model has more"
        )
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


def _times(
    options: Options, decoder: Decoder, variant: Any, result: Measured, arm: str
) -> WindowTime | None:
    """Layers of a few windows on the first prompt, outside the measured runs."""
    if not options.layers:
        return None
    row, snapshot, _ = decoder.read(0)
    short = Decoder(
        decoder.engine, replace(decoder.plan, n_tokens=min(TIMED_TOKENS, options.tokens)),
        decoder.make_drafter, decoder.replay, decoder.layers,
    )  # fmt: skip

    def run(timed: Any) -> None:
        short.write(timed, Run(arm, -2, 0, len(decoder.plan.prompts[0])), (row, snapshot))

    rows = result.usage[arm].rows
    cpu = {place.name: n for place, n in rows.items() if place.name.startswith("CPU")}
    on_time = cpu.get("CPU", 0) / sum(cpu.values()) if "CPU_LATE" in cpu else 0.0
    return time_layers(decoder.engine, variant, run, on_time)


def _limits(result: Measured, arm: str, costs: Costs, device: str) -> Record:
    usage = result.usage[arm]
    mean = {place: n / max(1, usage.windows) for place, n in usage.distinct.items()}
    limit = limit_of(costs.traffic, mean, costs.bandwidths, device)
    return {
        "fast_bytes_window": limit.fast_bytes,
        "host_bytes_window": limit.host_bytes,
        "limit_ms_window": 1e3 * limit.seconds,
        "limit_share": limit.share(result.ms_window(arm) / 1e3),
    }


def _facts(options: Options, model: Model, costs: Costs, trace: Ids | None) -> Record:
    """What the numbers hold for."""
    settings = model.settings
    changed = {
        name: info.show(getattr(settings, name))
        for name, info in SETTINGS.items()
        if getattr(settings, name) != info.default and not info.secret
    }
    locality: object = None if trace is None else measured(trace)
    return {
        "model": options.model,
        "device": settings.device if settings.device == "cpu" else torch.cuda.get_device_name(),
        "machine": f"{platform.machine()}, {settings.workers} workers, {settings.cpu_isa}",
        "workers": settings.workers,
        "expert_cache": model.engine.service.tier.n_slots,
        "resident_bytes": model.engine.service.tier.n_bytes,
        "ram_gb": settings.ram_gb,
        "vram_gb": settings.vram_gb,
        "context": settings.context,
        "settings": changed,
        "locality": locality,
        "window": [*options.windows, options.accept] if options.windows else settings.spec,
        "tokens": options.tokens,
        "dense_bytes": costs.traffic.dense_bytes,
        "all_expert_bytes": costs.traffic.all_expert_bytes,
        "bandwidths": vars(costs.bandwidths),
        "version": __version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _gain_lines(
    spec: ModelSpec,
    arms: Sequence[Arm],
    arm: Arm,
    times: WindowTime | None,
    result: Measured,
    device: str,
) -> list[str]:
    """Of a base without deferral: what it could gain, beside what the deferred arms gained."""
    deferred = [a for a in arms if a.changes.get("defer_cpu") == "1"]
    if times is None or arm.changes or not deferred:
        return []
    most = times.gain_ms(late_layers(spec))
    total = times.total_ms
    lines = [
        f"deferral: min(m, max(0, c - f)) over the layers gives at most {most:.2f} of "
        f"{total:.2f} ms a window, {100 * most / max(total - most, 1e-9):+.1f} %"
    ]
    for other in deferred:
        pairs = compare(result.of(arm.name), result.of(other.name))
        if pairs is not None:
            lines.append(f"  measured, {other.name} against {arm.name}: {pairs.line()}")
    if device == "cpu":
        lines.append("  (on the CPU both sides share the cores: there is nothing to overlap)")
    return lines
