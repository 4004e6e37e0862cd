"""Puts an engine together: the one place that knows every feature.

A feature is a rule of the plan, a worker of a place, or a transformation of the steps; it is added
here and nowhere else.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from strata.core.errors import FormatError, InputError
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import Effective
from strata.core.settings_resolve import Machine, effective_lines, resolve
from strata.engine.adaptive import adapting
from strata.engine.assembly import fast_tier_of, first_experts, tokenizer_of, workers_of
from strata.engine.calibrate import calibrate_at_start, require_times
from strata.engine.checkpoint_plan import (
    DTYPES,
    CheckpointPlan,
    expert_lines,
    memory_plan,
    understand,
)
from strata.engine.cpu_ops import native_ops, plain_ops
from strata.engine.disk_forecast import with_forecast
from strata.engine.engine import Engine
from strata.engine.expert_plan import (
    ExpertPlan,
    load_planned,
    plan_experts,
    require_gpu_reads,
)
from strata.engine.kv_class import kv_line
from strata.engine.layout_cost import MeasuredCost, read_speed
from strata.engine.machine import probe
from strata.engine.off_here import require_outputs, require_possible, without_effect
from strata.engine.overlaps import overlap_variants
from strata.engine.sampler import Sampler
from strata.engine.tuned import require_budget_alone, with_quality_budget
from strata.engine.variants import WindowVariants, build_variant, require_defer_layers
from strata.experts.fast_tier import FastTier, read_profile
from strata.experts.huge import huge_lines
from strata.experts.layouts import Entry
from strata.experts.service import ExpertService
from strata.experts.store import Progress, store_bytes
from strata.formats.tokenizer import Tokenizer
from strata.kernels.ops import Ops
from strata.memory.budget import Line, MemoryPlan, Probes, require_reserve
from strata.memory.state import SequenceState
from strata.models.kv import KV_DTYPES
from strata.models.network import build_network
from strata.models.synthetic import open_model
from strata.models.weights import load_weights
from strata.native import CpuPool
from strata.window.run import PLAIN, WindowRunner

MEASURE_FROM_BYTES = 2 << 30
"""Experts in all from which measuring speeds (about half a second) before loading is worth it."""


@dataclass(frozen=True)
class Ready:
    """A checkpoint understood and settings worked out; nothing allocated."""

    plan: CheckpointPlan
    effective: Effective
    experts: ExpertPlan
    memory: MemoryPlan

    @property
    def settings(self) -> Settings:
        """Complete settings."""
        return self.effective.settings

    @cached_property
    def tokenizer(self) -> Tokenizer | InputError:
        """Read when it is first asked for; an error says why there is no text."""
        return tokenizer_of(self.plan)

    def nothing_to_do(self) -> dict[str, str]:
        """Settings that will be "off here", and why, as far as it is known before loading."""
        slots = self.settings.expert_cache
        if slots == SETTINGS["expert_cache"].auto:  # what a GPU will have room for is not known
            slots = min(1, self.plan.n_pairs)
        return without_effect(self.settings, self.plan.spec, self.plan.n_pairs, slots)


Check = Callable[[Ready], None]
"""Raises for what cannot be done with a model, before it is loaded."""


def prepare(
    path: str | Path,
    asked: Effective,
    *,
    machine: Machine | None = None,
    probes: Probes | None = None,
    planning: bool = False,
) -> Ready:
    """Open the checkpoint, work settings out, plan the memory. The checkpoint stays open."""
    checkpoint = open_model(path)
    try:
        plan = understand(checkpoint)
        require_budget_alone(asked.settings)
        asked = asked if planning else with_quality_budget(checkpoint, asked)
        limit = plan.spec.max_context_tokens
        effective = resolve(asked, machine or probe(), limit, planning=planning)
        require_possible(effective.settings, plan.spec, plan.n_pairs)
        _require_profile(effective.settings, plan)
        if not planning:
            require_outputs(effective.settings)
        Sampler(effective.settings, plan.spec.n_vocab)  # a bias on no token is refused here
        memory = memory_plan(plan, effective.settings, probes or Probes())
        experts = _place_experts(plan, effective.settings, memory, measure=not planning)
        if list(experts.shapes) != plan.shapes:
            plan = replace(plan, shapes=list(experts.shapes))
            memory = memory_plan(plan, effective.settings, probes or Probes())
        if effective.settings.device == "cuda":
            require_gpu_reads(experts.shapes)
        if not planning:
            _require_times(plan, effective.settings)
    except BaseException:
        checkpoint.close()
        raise
    return Ready(plan, effective, experts, memory)


def assemble_device(ready: Ready, progress: Progress | None, device: torch.device) -> Engine:
    """An engine whose windows run on a device (``engine/build_device.py``).

    device "cpu": its kernels run in Triton's interpreter, for tests.
    """
    # by name: a machine without a GPU need not have Triton
    module = importlib.import_module("strata.engine.build_device")
    plan, settings, tokenizer = ready.plan, ready.settings, ready.tokenizer
    if device.type == "cuda":
        require_reserve(ready.memory, torch.cuda.mem_get_info(device)[0])
    made = module.assemble(plan, settings, ready.experts, progress, device)
    tier, variants = made.runner.service.tier, WindowVariants(PLAIN, {}, ())
    calibrated = calibrate_at_start(made.runner, settings, plan.checkpoint, tokenizer)

    def on_close() -> None:
        made.close()
        plan.checkpoint.close()

    return Engine(
        spec=plan.spec,
        settings=settings,
        tokenizer=tokenizer,
        runner=made.runner,
        plan=ready.memory,
        report=[
            *_report(ready, made.pool, tier, tokenizer, variants),
            kv_line(settings.kv, made.runner.network.state_specs()),
            *made.lines,
            *calibrated,
        ],
        on_close=on_close,
    )


def _place_experts(
    plan: CheckpointPlan, settings: Settings, memory: MemoryPlan, *, measure: bool
) -> ExpertPlan:
    """Layouts of the experts, within what the memory plan leaves.

    measure: whether this machine's speeds count; a plan may be about another machine.
    """
    others = memory.need("ram") - _ram(expert_lines(plan.shapes, settings))
    room = memory.limits["ram"].n_bytes - others

    def fits(shapes: Sequence[Entry]) -> bool:
        return _ram(expert_lines(shapes, settings)) <= room

    # the float64 reference reads any layout, but nothing becomes faster by it
    plain = settings.dtype == "float64"
    pool_reads = bool(getattr(CpuPool, "reads_tiles", False))
    reads_tiles = settings.expert_layout == "tiles" if plain else pool_reads
    large = store_bytes(plan.shapes) >= MEASURE_FROM_BYTES
    with ExitStack() as stack:
        cost = None
        # a GPU reads tiles, so what the CPU alone prefers does not count
        on_cpu = settings.device == "cpu"
        if measure and large and reads_tiles and settings.expert_layout == "auto" and on_cpu:
            pool = CpuPool(workers=settings.workers, isa=settings.cpu_isa)
            stack.callback(pool.close)
            cost = MeasuredCost(pool, read_speed(settings.workers))
        chosen = plan_experts(
            plan.shapes,
            plan.experts,
            plan.checkpoint,
            settings,
            reads_tiles=reads_tiles,
            fits=fits,
            cost=cost,
        )
    if cost is not None:
        chosen = replace(chosen, lines=(*chosen.lines, *cost.lines()))
    return chosen


def _ram(lines: Iterable[Line]) -> int:
    return sum(line.n_bytes for line in lines if line.tier == "ram")


def plan_model(path: str | Path, asked: Effective, probes: Probes | None = None) -> Ready:
    """Bytes per tier, the verdict, and what would have nothing to do, with nothing loaded."""
    ready = prepare(path, asked, probes=probes, planning=True)
    ready.plan.checkpoint.close()
    return ready


def build(
    path: str | Path,
    asked: Effective,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Engine:
    """Load a model. DoesNotFitError before anything is allocated when the plan exceeds a limit.
    check: the caller's own look at what is asked, before a weight is read."""
    ready = prepare(path, asked)
    checkpoint = ready.plan.checkpoint
    try:
        ready.memory.require_fit()
        experts = with_forecast(ready.experts, ready.plan, ready.settings, ready.memory)
        ready = replace(ready, experts=experts)
        if check is not None:
            check(ready)
        engine = _assemble(ready, progress)
        return adapting(engine, ready.plan.n_experts_L)
    except BaseException:
        checkpoint.close()
        raise


def _assemble(ready: Ready, progress: Progress | None) -> Engine:
    plan, settings = ready.plan, ready.settings
    if settings.device == "cuda":
        return assemble_device(ready, progress, torch.device("cuda"))
    torch.set_num_threads(1)  # products run in our pool; torch's own threads would fight it
    tokenizer = ready.tokenizer
    roles = load_weights(plan.checkpoint, plan.spec, plan.sources, copy=True)
    store = load_planned(ready.experts, plan.experts, settings, progress)
    pool = CpuPool(workers=settings.workers, isa=settings.cpu_isa)
    ops = _ops(settings, pool)
    tier = fast_tier_of(plan, settings, store, settings.expert_cache)
    service = ExpertService(tier, workers_of(settings, store, tier, pool))
    device = torch.device("cpu")
    network = build_network(plan.spec, roles, ops, KV_DTYPES[settings.kv], device)
    state = SequenceState(network.state_specs(), settings.context, device)
    variants = build_variant(settings, network, service)
    overlaps = overlap_variants(settings, network, service, variants.default)
    runner = WindowRunner(
        network, service, state, variants.default, poison=settings.poison, overlaps=overlaps
    )
    calibrated = calibrate_at_start(runner, settings, plan.checkpoint, tokenizer)
    gc.collect()

    def on_close() -> None:
        pool.close()
        plan.checkpoint.close()

    return Engine(
        spec=plan.spec,
        settings=settings,
        tokenizer=tokenizer,
        runner=runner,
        plan=ready.memory,
        report=[
            *_report(ready, pool, tier, tokenizer, variants),
            kv_line(settings.kv, network.state_specs()),
            *huge_lines(store),
            *calibrated,
        ],
        on_close=on_close,
    )


def _ops(settings: Settings, pool: CpuPool) -> Ops:
    dtype = DTYPES[settings.dtype]
    return native_ops(pool) if dtype is torch.float32 else plain_ops(dtype)


def _require_profile(settings: Settings, plan: CheckpointPlan) -> None:
    """The profile of experts can be read, and ranks as many as there is room for."""
    if settings.expert_profile is not None:
        pairs = read_profile(settings.expert_profile, plan.n_experts_L)
        if settings.expert_cache > len(pairs):
            raise InputError(
                f"{settings.expert_profile} ranks {len(pairs)} experts, "
                f"fewer than --expert-cache {settings.expert_cache}"
            )


def _require_times(plan: CheckpointPlan, settings: Settings) -> None:
    """Stored times belong to what will be loaded; on a GPU with an automatic cache the resident
    experts are known later."""
    n_slots = settings.expert_cache
    if n_slots >= plan.n_pairs or not require_defer_layers(settings, plan.spec):
        return  # nothing will be late
    pairs = None
    if n_slots != SETTINGS["expert_cache"].auto:
        pairs = first_experts(settings, plan.n_experts_L, n_slots)
    require_times(settings, plan.checkpoint, pairs)


def _report(
    ready: Ready,
    pool: CpuPool,
    tier: FastTier,
    tokenizer: Tokenizer | InputError,
    variants: WindowVariants,
) -> list[str]:
    plan, settings = ready.plan, ready.settings
    n_resident = len(tier.resident())
    nothing_to_do = without_effect(settings, plan.spec, plan.n_pairs, n_resident)
    why_not = dict(variants.why_not) | nothing_to_do
    if settings.stop and isinstance(tokenizer, InputError):
        why_not["stop"] = "answers are ids without text, in which no text is found"
    lines = [
        f"{plan.checkpoint.root}: {plan.spec.family}, {plan.spec.n_layers} layers, "
        f"{plan.n_pairs} routed experts",
        *plan.weights.lines(),
        f"CPU pool: {pool.workers} workers on CPUs {pool.cpus}, {pool.isa} kernels",
        *(pool.affinity if len(pool.nodes) > 1 else ()),
        f"experts: {plan.n_pairs} {'on disk' if settings.experts_on_disk else 'in RAM'}, "
        f"{n_resident} of them also in the fast tier",
        *ready.experts.lines,
        *effective_lines(ready.effective, why_not),
        *variants.lines,
    ]
    if isinstance(tokenizer, InputError):
        lines.append(f"text in and out: off here: {tokenizer}")
    return lines


__all__ = ["FormatError", "Ready", "build", "plan_model", "prepare"]
