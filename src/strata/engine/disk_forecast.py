"""What --experts-on-disk will cost, said before anything is loaded.

Measured: direct reads of this file, and memory and kernels for what is in memory. The forecast adds
the two times, as if experts were used evenly: use that favours some of them is faster, and what
else a token takes (attention, head) comes on top.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strata.core.settings import Settings
from strata.engine.checkpoint_plan import CheckpointPlan
from strata.engine.expert_plan import ExpertPlan
from strata.engine.layout_cost import MeasuredCost, read_speed
from strata.experts.layouts import Cost
from strata.experts.mapped import mapped_bytes
from strata.formats.checkpoint import Checkpoint
from strata.formats.disk_speed import Span, disk_speed
from strata.formats.paging import pages_in_memory
from strata.memory.budget import GIB, MemoryPlan
from strata.models.expert_source import ExpertSource
from strata.models.spec import MoeSpec
from strata.native import CpuPool

log = logging.getLogger("strata.engine")

FROM_BYTES = 256 << 20
"""Experts in all from which the forecast, about a second, is worth it."""
_SAMPLES, _SAMPLE_BYTES = 512, 1 << 20


@dataclass(frozen=True)
class Forecast:
    """file_bytes, token_bytes: experts in the file, and of them read for one token.

    cached: share of the file that is in memory now, None where the system does not tell.
    room: share that memory can hold beside the model.
    disk_bytes_per_s: or why it is not known.
    memory_s: seconds of a token whose experts are all in memory.
    """

    file_bytes: int
    token_bytes: int
    cached: float | None
    room: float
    disk_bytes_per_s: float | str
    memory_s: float

    def tokens_per_s(self, share: float) -> float | None:
        """With that share of the experts in memory; None without a measured disk."""
        if share >= 1:
            return 1 / self.memory_s
        if isinstance(self.disk_bytes_per_s, str):
            return None
        return 1 / (self.memory_s + self.token_bytes * (1 - share) / self.disk_bytes_per_s)

    def lines(self) -> list[str]:
        """For people: what was found, and what to expect."""
        disk = self.disk_bytes_per_s
        reads = (
            f"the disk's speed is not known ({disk})"
            if isinstance(disk, str)
            else f"the disk reads {disk / 1e9:.2f} GB/s (measured on this file)"
        )
        cached = "an unknown share" if self.cached is None else f"{self.cached:.0%}"
        now = self.tokens_per_s(self.cached or 0.0)
        later = self.tokens_per_s(self.room)
        speeds = [] if now is None else [f"{_speed(now)} tokens/s now"]
        speeds += [] if later is None else [f"{_speed(later)} once memory is filled"]
        text = "at most " + " and ".join(speeds) if speeds else "a speed nobody can say"
        found = [
            f"experts on disk: {self.file_bytes / GIB:.2f} GiB, {cached} of it in memory now, "
            f"room for {self.room:.0%} beside the model; {reads}",
            f"experts on disk: expect {text} (windows of 1; a token reads "
            f"{self.token_bytes / 1e9:.2f} GB of experts, {1e3 * self.memory_s:.0f} ms of it where "
            f"all are in memory; experts used evenly)",
        ]
        if self.room >= 1:
            found.append("experts on disk: they fit in memory; without the setting they are faster")
        return found


def with_forecast(
    experts: ExpertPlan, plan: CheckpointPlan, settings: Settings, memory: MemoryPlan
) -> ExpertPlan:
    """The plan with the forecast among its lines, which are logged as warnings at once; as it is
    when experts do not stay on disk, or are few."""
    on_disk, _ = mapped_bytes(plan.shapes)
    if not settings.experts_on_disk or on_disk < FROM_BYTES:
        return experts
    lines = forecast(plan, settings, memory).lines()
    for line in lines:
        log.warning(line)
    return replace(experts, lines=(*experts.lines, *lines))


def forecast(plan: CheckpointPlan, settings: Settings, memory: MemoryPlan) -> Forecast:
    """Measure; about a second."""
    on_disk, _ = mapped_bytes(plan.shapes)
    weights = token_weights(plan)
    pool = CpuPool(workers=settings.workers, isa=settings.cpu_isa)
    try:
        # memory is short where experts stay on disk
        most = memory.limits["ram"].n_bytes // 4
        cost = MeasuredCost(pool, read_speed(settings.workers, most))
        memory_s = memory_seconds(weights, cost)
    finally:
        pool.close()
    free = memory.limits["ram"].n_bytes - memory.need("ram")
    return Forecast(
        file_bytes=on_disk,
        token_bytes=token_bytes(plan),
        cached=cached_share(plan.checkpoint, plan.experts),
        room=min(1.0, max(0.0, free / on_disk)),
        disk_bytes_per_s=disk_speed(spans(plan.checkpoint, plan.experts)),
        memory_s=memory_s,
    )


def token_weights(plan: CheckpointPlan) -> dict[str, int]:
    """Weights of each type that a token's routed experts multiply, over all layers."""
    found: Counter[str] = Counter()
    for layer, entry in zip(plan.spec.layers, plan.shapes, strict=True):
        if isinstance(layer.ffn, MoeSpec) and entry is not None:
            for kind in entry[0].types:
                found[kind] += layer.ffn.n_active * entry[0].d_model * entry[0].d_expert
    return dict(found)


def token_bytes(plan: CheckpointPlan) -> int:
    """Bytes of the matrices of a token's routed experts, over all layers."""
    return sum(
        layer.ffn.n_active * entry[0].weight_bytes
        for layer, entry in zip(plan.spec.layers, plan.shapes, strict=True)
        if isinstance(layer.ffn, MoeSpec) and entry is not None
    )


def memory_seconds(weights: Mapping[str, int], cost: Cost) -> float:
    """Seconds of so many weights of each type as the file has them, all in memory."""
    return sum(n * cost(kind, "native") for kind, n in weights.items())


def spans(checkpoint: Checkpoint, source: ExpertSource) -> list[Span]:
    """Where the experts' tensors lie."""
    infos = [checkpoint.info(name) for name in _names(checkpoint, source)]
    return [Span(info.path, info.offset, info.n_bytes) for info in infos]


def cached_share(checkpoint: Checkpoint, source: ExpertSource) -> float | None:
    """Share of the experts' bytes that is in memory now, by a sample of places.

    None where the system does not tell: of files that are neither ours nor ours to write.
    """
    if not all(_told(path.stat().st_uid, os.access(path, os.W_OK)) for path in checkpoint.paths):
        return None
    names = _names(checkpoint, source)
    if not names:
        return None
    draw, there, pages = random.Random(0), 0, 0
    sizes = [checkpoint.info(name).n_bytes for name in names]
    for name in draw.choices(names, sizes, k=_SAMPLES):
        raw = checkpoint.raw(name)
        at = draw.randrange(max(1, len(raw) - _SAMPLE_BYTES))
        counted = pages_in_memory(raw[at : at + _SAMPLE_BYTES])
        if counted is None:
            return None
        there, pages = there + counted[0], pages + counted[1]
    return there / pages


def _told(owner: int, writable: bool) -> bool:
    return writable or owner == os.geteuid()


def _names(checkpoint: Checkpoint, source: ExpertSource) -> Sequence[str]:
    return [n for n in source.tensor_names() if checkpoint.info(n).n_bytes >= 2 * _SAMPLE_BYTES]


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.2f}" if tokens_per_s < 1 else f"{tokens_per_s:.1f}"
