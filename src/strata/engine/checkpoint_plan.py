"""Everything known about a checkpoint before a weight is read: its spec, its names, its bytes, and
whether they fit.

The network is put together once from weights without memory (torch's meta device), so the sizes of
buffers and state are
those of the real parts and not a second book-keeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.core.settings import SETTINGS, Settings
from strata.engine.device_room import (
    RESERVE_BYTES,
    dense_bytes,
    pairs_and_slot,
    slots_in,
    staging_beside,
)
from strata.experts.layouts import Entry
from strata.experts.loader import expert_shapes, peak_bytes
from strata.experts.mapped import mapped_bytes
from strata.experts.store import store_bytes
from strata.formats.checkpoint import Checkpoint
from strata.kernels.expert_rows import ExpertShape
from strata.kernels.ops import reference_ops
from strata.kernels.weight import Weight
from strata.memory.budget import GIB, Limit, Line, MemoryPlan, Probes, ram_limits, smallest
from strata.models.attention import Attention
from strata.models.expert_source import ExpertSource
from strata.models.family import Family
from strata.models.inventory import inventory
from strata.models.kv import KV_DTYPES
from strata.models.network import Network, build_network
from strata.models.registry import find_family
from strata.models.sources import Sources
from strata.models.spec import ModelSpec, MoeSpec
from strata.models.synthetic import thinned
from strata.models.weights import LoadReport, PlannedWeight, plan_weights
from strata.window.layer import window_buffers
from strata.window.run import MAX_WINDOW_TOKENS

DTYPES = {"float32": torch.float32, "float64": torch.float64}
INTERPRETER_BYTES = 320 << 20
"""Python, torch and the tokenizer, before any weight: measured 250 to 310 MiB resident on Linux,
x86-64."""


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint understood: what will be loaded, and what it takes."""

    checkpoint: Checkpoint
    family: Family
    spec: ModelSpec
    sources: Sources
    experts: ExpertSource
    shapes: list[tuple[ExpertShape, int] | None]
    weights: LoadReport

    @property
    def n_experts_L(self) -> list[int]:
        """Routed experts of each layer (0 for layers without)."""
        return [entry[1] if entry is not None else 0 for entry in self.shapes]

    @property
    def n_pairs(self) -> int:
        """All (layer, expert) pairs."""
        return sum(self.n_experts_L)


def understand(checkpoint: Checkpoint) -> CheckpointPlan:
    """Read names, shapes and settings; check that every weight has a tensor and every tensor a
    use."""
    family = find_family(checkpoint)
    spec = family.spec(checkpoint)
    sources = family.sources(checkpoint, spec)
    experts = thinned(checkpoint, family.expert_source(checkpoint, spec))
    weights = plan_weights(checkpoint, spec, sources, experts)
    shapes = expert_shapes(spec, experts)
    return CheckpointPlan(checkpoint, family, spec, sources, experts, shapes, weights)


def _kept_conversations(network: Network, settings: Settings) -> tuple[Line, ...]:
    """Copies of recurrent state, and the budget of parked conversations when one is given."""
    specs = [spec for group in network.state_specs() for spec in group.values()]
    copy = sum(
        spec.entry_bytes * (1 if spec.kind == "recurrent" else spec.ring_entries)
        for spec in specs
        if spec.kind != "positional"
    )
    most = settings.checkpoints + 1  # one more while the oldest is chosen
    return (
        Line(
            "ram",
            f"conversation checkpoints ({settings.checkpoints})",
            most * copy,
            "--checkpoints",
        ),
        Line("ram", "parked conversations", int(max(0.0, settings.park_gb) * GIB), "--park-gb"),
    )


def memory_plan(plan: CheckpointPlan, settings: Settings, probes: Probes) -> MemoryPlan:
    """Bytes per owner for resolved settings, and the limits they meet. Allocates nothing.

    With a GPU everything but the experts lies in its memory, and --expert-cache auto is as many
    experts as --vram-gb leaves room for.
    """
    network = _meta_network(plan, settings)
    context = settings.context
    state = sum(s.n_bytes(context) for group in network.state_specs() for s in group.values())
    chunk = min(settings.prompt_chunk, context)
    fast = _fast_memory(settings)
    on_gpu = fast == "vram"
    weights = plan.weights.dense_bytes
    if on_gpu:
        weights = dense_bytes(plan.spec, plan.weights.planned)
    dense = (
        Line(fast, "dense weights", weights),
        Line(fast, f"state at {context} tokens of context", state, "--context"),
        Line(
            fast,
            f"window buffers (up to {settings.spec} tokens)",
            _windows(network, settings),
            "--spec",
        ),
        Line(
            fast,
            f"prompt buffers (chunks of {chunk} tokens)",
            _chunk(network, settings, chunk),
            "--prompt-chunk",
        ),
        *((Line(fast, "graphs and compiled kernels", RESERVE_BYTES),) if on_gpu else ()),
        *_decoded(network, settings),
    )
    limits = {"ram": smallest(_limits(settings, probes))}
    room = 0
    if fast == "vram" and settings.vram_gb:
        limits["vram"] = Limit(f"--vram-gb {settings.vram_gb:g}", int(settings.vram_gb * GIB))
        room = limits["vram"].n_bytes - sum(line.n_bytes for line in dense)
    lines = (
        *expert_lines(plan.shapes, settings, room),
        *dense,
        Line("ram", "interpreter and libraries", INTERPRETER_BYTES),
        *_kept_conversations(network, settings),
        Line("disk", "read on demand from the file", plan.weights.on_disk_bytes),
    )
    return MemoryPlan(lines, limits)


def _fast_memory(settings: Settings) -> str:
    return "vram" if settings.device == "cuda" else "ram"


def expert_lines(shapes: Sequence[Entry], settings: Settings, room: int = 0) -> tuple[Line, ...]:
    """What the routed experts take, while loading too. room: bytes that --expert-cache auto may
    fill."""
    n_pairs, slot_bytes = pairs_and_slot(shapes)
    slots = min(settings.expert_cache, n_pairs)
    if settings.expert_cache == SETTINGS["expert_cache"].auto:
        slots = slots_in(shapes, room)
    name = f"fast tier ({slots} experts)"
    fast = _fast_memory(settings)
    tier = Line(fast, name, slots * slot_bytes, "--expert-cache")
    if settings.experts_on_disk:
        on_disk, extras = mapped_bytes(shapes)
        return (
            Line("ram", "routed experts: biases and scales", extras),
            tier,
            Line("disk", "routed experts, in the page cache as far as it goes", on_disk),
        )
    loading = peak_bytes(shapes, settings.workers)
    staging = staging_beside(shapes, slots, room) if fast == "vram" else 0
    return (
        Line("ram", "routed experts", store_bytes(shapes), "--experts-on-disk"),
        tier,
        Line(fast, "experts on their way (prompts)", staging),
        Line("ram", f"loading ({settings.workers} threads)", loading, "--workers"),
    )


def _decoded(network: Network, settings: Settings) -> tuple[Line, ...]:
    """Codes that the CPU decodes, a layer at a time; a GPU decodes in its registers."""
    layers = [m.decoded_bytes for m in network.mixers if isinstance(m, Attention)]
    most = max(layers, default=0) * settings.context
    if not most or settings.device == "cuda":
        return ()
    return (Line("ram", "keys and values of a layer, decoded", most),)


def _limits(settings: Settings, probes: Probes) -> list[Limit]:
    limits = ram_limits(probes)
    if settings.ram_gb:
        # a figure given by hand replaces what is free now: the question may be about another
        # machine
        return [Limit(f"--ram-gb {settings.ram_gb:g}", int(settings.ram_gb * GIB))]
    return limits


def _chunk(network: Network, settings: Settings, n_tokens: int) -> int:
    """Buffers of a prompt's chunk; in exact numerics a GPU keeps its streams, its experts' inputs
    (floats, int8 and their scales), rows and logits, the shared expert's results, and a window."""
    if settings.device == "cuda" and settings.numerics == "exact":
        spec = network.spec
        routed = [x.ffn.n_experts for x in spec.layers if isinstance(x.ffn, MoeSpec)]
        rows = spec.streams + (network.n_active + 4 if routed else 0)
        kept = n_tokens * 4 * (rows * spec.d_model + max(routed, default=0))
        return kept + _frame(network, MAX_WINDOW_TOKENS, MAX_WINDOW_TOKENS, True)
    return _frame(network, n_tokens, 1, False)


def _windows(network: Network, settings: Settings) -> int:
    sizes = {1, settings.spec} if settings.draft == "none" else set(range(1, settings.spec + 1))
    return sum(_frame(network, n, n, True) for n in sizes)


def _frame(network: Network, n_tokens: int, n_head: int, keep_inputs: bool) -> int:
    layers = network.buffer_layers()
    total = 0
    for name, spec in window_buffers(network).items():
        lead = {"T": n_tokens, "R": n_tokens * max(network.n_active, 1), "H": n_head}[spec.lead]
        copies = len(layers.get(name, ())) if spec.per_layer and keep_inputs else 1
        total += spec.n_bytes(lead) * copies
    return total


def _meta_network(plan: CheckpointPlan, settings: Settings) -> Network:
    kinds = inventory(plan.spec)
    roles = {w.role: _meta(w, kinds[w.role].kind == "matrix") for w in plan.weights.planned}
    ops = reference_ops(DTYPES[settings.dtype])
    return build_network(plan.spec, roles, ops, KV_DTYPES[settings.kv], torch.device("meta"))


def _meta(weight: PlannedWeight, is_matrix: bool) -> Weight | torch.Tensor:
    if not is_matrix:
        return torch.empty(weight.shape, dtype=torch.float32, device="meta")
    n_rows, n_cols = weight.shape
    row_bytes = weight.n_bytes // max(n_rows, 1)
    data = torch.empty((n_rows, row_bytes), dtype=torch.uint8, device="meta")
    return Weight(weight.type, n_rows, n_cols, data)
