"""Puts an engine with a GPU together: weights and hot experts in its memory, windows as graphs.

Loaded only when a device is used, because its kernels need Triton. Everything that does not depend
on where windows run lies in ``engine/assembly.py``.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from strata.core.errors import DoesNotFitError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.core.types import Place
from strata.engine.assembly import fast_tier_of, workers_of
from strata.engine.checkpoint_plan import CheckpointPlan
from strata.engine.device_room import RESERVE_BYTES, slots_in, staging_beside
from strata.engine.device_variants import device_variant
from strata.engine.expert_plan import ExpertPlan, load_planned, require_gpu_reads
from strata.engine.overlaps import choices
from strata.engine.page_locks import lock_experts
from strata.experts.device_service import DeviceService
from strata.experts.fast_tier import FastTier
from strata.experts.link_part import Moved, share_numerator
from strata.experts.prompt_experts import PromptExperts
from strata.experts.share_control import SOUGHT, ShareControl
from strata.experts.store import ExpertLayer, ExpertStore, Progress, stride_of
from strata.experts.stream import LayerStream
from strata.kernels.embed.native import lookup
from strata.memory.budget import GIB
from strata.memory.handshake import Area, Handshake, PlainArea, area_bytes
from strata.memory.mapped import (
    CudaDriver,
    Driver,
    MappedArea,
    unlock_pages,
)
from strata.models.gpu.frame import DeviceState
from strata.models.gpu.network import GpuNetwork, NgramRows, build_gpu_network
from strata.models.gpu.roles import to_device
from strata.models.kv import KV_DTYPES
from strata.models.ngram import gather, row_ids
from strata.models.spec import MoeSpec
from strata.models.weights import load_weights
from strata.native import CpuPool
from strata.window.device_chunk import ChunkReader, PromptReader
from strata.window.device_fast import FastReader, can_read
from strata.window.device_run import DeviceRunner, DeviceVariant
from strata.window.run import MAX_WINDOW_TOKENS

FIRST_SHARE = 0.25
SPIN_US = 1000
"""Workers wait awake for the next layer's ring."""


@dataclass(frozen=True)
class DeviceEngine:
    """What ``engine.build`` makes an Engine of."""

    runner: DeviceRunner
    pool: CpuPool
    lines: list[str]
    on_close: tuple[Callable[[], None], ...]

    def close(self) -> None:
        """Stop the workers, and undo what the driver was told of our memory."""
        self.pool.close()
        for undo in self.on_close:
            undo()


def assemble(
    plan: CheckpointPlan,
    settings: Settings,
    experts: ExpertPlan,
    progress: Progress | None,
    device: torch.device,
) -> DeviceEngine:
    """Load the model. device "cpu": kernels run in Triton's interpreter, for tests.

    DoesNotFitError when VRAM is too small for the dense part; SettingError for what cannot be had.
    """
    require_gpu_reads(experts.shapes)
    torch.set_num_threads(1)
    compiled = device.type == "cuda"
    workers = settings.workers
    roles = load_weights(plan.checkpoint, plan.spec, plan.sources, copy=False, workers=workers)
    ngram_rows = _ngram_rows(plan, roles)
    on_device = to_device(roles, device, progress, workers=workers)
    network = build_gpu_network(
        plan.spec, on_device, KV_DTYPES[settings.kv], settings.context, device, ngram_rows
    )
    state = DeviceState(network.state_specs(), settings.context, device)
    del roles
    store = load_planned(experts, plan.experts, settings, progress)
    pool = CpuPool(workers=settings.workers, isa=settings.cpu_isa, spin_us=SPIN_US)
    driver = _driver() if compiled else None
    n_slots, staged = _slots(plan, settings, store, device)
    # before the tier is filled: copies from page-locked memory are several times faster
    reach, locked, reach_line = lock_experts(settings, store, driver)
    tier = fast_tier_of(plan, settings, store, n_slots, device)
    shake = _handshake(network, driver)
    n_active = [
        layer.ffn.n_active if isinstance(layer.ffn, MoeSpec) else 0 for layer in plan.spec.layers
    ]
    by_place = workers_of(settings, store, tier, pool)
    host = {p: by_place[p] for p in (Place.CPU, Place.CPU_LATE)}
    service = DeviceService(tier, store, host, shake, device, n_active, reach)
    if compiled:
        service.serve_natively(pool, store)
    share = _share(settings, service, reach is not None)
    variant, variant_lines = device_variant(settings, network, service)
    reader = _reader(settings, network, service, state, store, tier) if staged else None
    least = _short_read(settings, plan)
    by_stream = settings.wait == "memop"
    runner = DeviceRunner(network, service, state, variant, share, reader, least, by_stream)
    runner.variant_for = partial(_variant_for, settings, network, service, share)
    pools = _Pools(settings, store, tier, service, pool, compiled)
    runner.use_workers = pools.use
    runner.overlaps |= choices(settings, network.n_active, variant, runner.variant_for)
    gc.collect()
    lines = [
        f"VRAM: {len(tier.resident())} of {plan.n_pairs} experts "
        f"({tier.n_bytes / GIB:.2f} GiB), state {state.n_bytes / GIB:.2f} GiB",
        reach_line,
        *variant_lines,
        *_share_lines(settings, share, variant),
    ]
    undo = [partial(unlock_pages, driver, one) for one in locked if driver is not None]
    return DeviceEngine(runner, pool, [x for x in lines if x], (pools.close, shake.close, *undo))


class _Pools:
    """The pool that answers rings, which measurements exchange for one with other workers."""

    def __init__(
        self,
        settings: Settings,
        store: ExpertStore,
        tier: FastTier,
        service: DeviceService,
        pool: CpuPool,
        native: bool,
    ) -> None:
        self._settings, self._store, self._tier = settings, store, tier
        self._service, self._pool, self._native = service, pool, native

    def use(self, workers: int) -> None:
        """From the next window on, so many workers compute the CPU's rows."""
        made = CpuPool(workers=workers, isa=self._settings.cpu_isa, spin_us=SPIN_US)
        by_place = workers_of(self._settings, self._store, self._tier, made)
        self._service.workers.update({p: by_place[p] for p in self._service.workers})
        if self._native:
            self._service.serve_natively(made, self._store)
        self._pool.close()
        self._pool = made

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def _share_lines(
    settings: Settings, share: ShareControl | None, variant: DeviceVariant
) -> list[str]:
    """What becomes of an automatic PCIe share beside late rows."""
    if share is None or not share.seeks or not variant.share_rests:
        return []
    return [
        f"pcie-frac: {FIRST_SHARE} in windows with late rows, and not sought while they run: what "
        f"the link takes is not late, so the text would not repeat; --pcie-frac gives another"
    ]


def _reader(
    settings: Settings,
    network: GpuNetwork,
    service: DeviceService,
    state: DeviceState,
    store: ExpertStore,
    tier: FastTier,
) -> PromptReader | None:
    """Who reads long prompts; None when experts stay on disk, where none can be copied from.

    SettingError for --numerics fast with a mixer that has no fast form.
    """
    kinds = [layer for layer in store.layers if layer is not None]
    if not all(isinstance(layer, ExpertLayer) for layer in kinds):
        return None
    stream = LayerStream(store, tier, network.device)
    auto = settings.prompt_cpu == SETTINGS["prompt_cpu"].auto
    share = None if auto else settings.prompt_cpu
    prompt = PromptExperts(service, stream, network.spec.d_model, share)
    if settings.numerics == "exact":
        return ChunkReader(network, state, prompt)
    if not can_read(network):
        raise SettingError(
            f"--numerics fast: {network.spec.family} has latent attention, whose prompts have no "
            f"tensor-core form in this version; use exact"
        )
    return FastReader(network, state, prompt)


def _short_read(settings: Settings, plan: CheckpointPlan) -> int:
    """Tokens from which copying every expert once is quicker than windows that compute theirs."""
    if settings.short_read != SETTINGS["short_read"].auto:
        return settings.short_read
    routed = [x.ffn for x in plan.spec.layers if isinstance(x.ffn, MoeSpec)]
    # a window of 8 takes nearly 8 K experts, at about 2.7 times the speed of the link
    return max((round(2.7 * f.n_experts / f.n_active) for f in routed), default=MAX_WINDOW_TOKENS)


def _share(settings: Settings, service: DeviceService, reaches: bool) -> ShareControl | None:
    """The PCIe share, fixed or found while running; None when the GPU reads no expert in RAM."""
    if not reaches:
        return None
    on_device: dict[Moved, torch.Tensor] = {}
    table = service.rules.moved

    def apply(moved: Moved) -> None:
        if moved not in on_device:
            on_device[moved] = torch.tensor(moved, dtype=table.dtype, device=table.device)
        table.copy_(on_device[moved])

    seeks = settings.pcie_frac == SETTINGS["pcie_frac"].auto
    first = FIRST_SHARE if seeks else settings.pcie_frac
    return ShareControl(share_numerator(first), len(table), apply, seeks)


def _variant_for(
    own: Settings,
    network: GpuNetwork,
    service: DeviceService,
    share: ShareControl | None,
    wanted: Settings,
) -> DeviceVariant:
    """The windows of other settings on this engine, whose own are ``own``. SettingError for a PCIe
    share when no expert in RAM is within the GPU's reach."""
    variant = device_variant(wanted, network, service)[0]
    if wanted.pcie_frac == own.pcie_frac:
        return variant
    if share is None:
        raise SettingError(
            "pcie-frac: no expert in RAM is within the GPU's reach here; load the model without "
            "--pcie-frac 0, and with experts in RAM"
        )
    sought = wanted.pcie_frac == SETTINGS["pcie_frac"].auto
    return replace(variant, share=SOUGHT if sought else share_numerator(wanted.pcie_frac))


def _ngram_rows(plan: CheckpointPlan, roles: object) -> dict[int, NgramRows]:
    """Gatherers over the tables that stay on the host."""
    found: dict[int, NgramRows] = {}
    for index, layer in enumerate(plan.spec.layers):
        spec = layer.ngram
        if spec is None:
            continue
        table = roles[f"layers.{index}.ngram.table"]  # type: ignore[index]

        def rows(
            previous: Sequence[int],
            tokens: Sequence[int],
            spec: object = spec,
            table: object = table,
        ) -> torch.Tensor:
            ids_TH = row_ids(spec, previous, tokens)  # type: ignore[arg-type]
            return gather(spec, table, ids_TH, lookup)  # type: ignore[arg-type]

        found[index] = rows
    return found


def _slots(
    plan: CheckpointPlan, settings: Settings, store: ExpertStore, device: torch.device
) -> tuple[int, bool]:
    """Experts that VRAM holds, as asked or as many as are left room for; and whether prompts can
    have the others pass through it."""
    layers = [layer for layer in store.layers if layer is not None]
    if not layers:
        return 0, True
    auto = SETTINGS["expert_cache"].auto
    slot_bytes = max(stride_of(g.shape) for g in layers)
    if device.type != "cuda":
        return (0 if settings.expert_cache == auto else settings.expert_cache), True
    free, total = torch.cuda.mem_get_info(device)
    if settings.vram_gb:
        free = min(free, int(settings.vram_gb * GIB) - (total - free))
    free = max(0, free - RESERVE_BYTES)
    shapes = [None if g is None else (g.shape, g.n_experts) for g in store.layers]
    slots = slots_in(shapes, free) if settings.expert_cache == auto else settings.expert_cache
    if slots * slot_bytes > free:
        raise DoesNotFitError(
            f"--expert-cache {settings.expert_cache}: "
            f"{settings.expert_cache * slot_bytes / GIB:.2f} GiB of experts, and "
            f"{free / GIB:.2f} GiB of VRAM are left "
            f"({free // slot_bytes} experts); ask for that or less"
        )
    return slots, slots == plan.n_pairs or staging_beside(shapes, slots, free) > 0


def _driver() -> Driver:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        raise SettingError(
            "--device cuda: the package cuda-bindings is missing; pip install cuda-bindings"
        ) from None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return CudaDriver(runtime)


def _handshake(network: GpuNetwork, driver: Driver | None) -> Handshake:
    d_model, n_tokens = network.spec.d_model, MAX_WINDOW_TOKENS
    n_rows = n_tokens * max(network.n_active, 1)
    n_bytes = area_bytes(d_model, n_tokens, n_rows)
    area: Area
    if driver is None:
        area = PlainArea(n_bytes)
    else:
        area = MappedArea(
            driver,
            n_bytes,
            lambda why: SettingError(
                f"--device cuda: {n_bytes} bytes cannot be page-locked: {why}"
            ),
        )
    return Handshake(area, d_model, n_tokens, n_rows)
