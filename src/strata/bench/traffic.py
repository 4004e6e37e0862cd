"""Bytes that a window must move, in the file's own types, and the time that takes at least.

Counted are dense weights (less the embedding, of which a token reads one row) and distinct routed
experts; keys, values and recurrent state are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.bench.machine import Bandwidths
from strata.core.types import Place
from strata.engine.checkpoint_plan import CheckpointPlan
from strata.models.spec import MoeSpec
from strata.models.weights import PlannedWeight


@dataclass(frozen=True)
class Traffic:
    """What a model moves. expert_bytes_L: of one expert of each layer, 0 where there are none."""

    dense_bytes: int
    expert_bytes_L: tuple[int, ...]
    n_experts_L: tuple[int, ...]
    n_active_L: tuple[int, ...]

    @property
    def mean_expert_bytes(self) -> float:
        """Of an expert of an average layer."""
        sizes = [size for size in self.expert_bytes_L if size]
        return sum(sizes) / len(sizes) if sizes else 0.0

    @property
    def routed_bytes(self) -> int:
        """Expert bytes of one token."""
        return sum(s * k for s, k in zip(self.expert_bytes_L, self.n_active_L, strict=True))

    @property
    def all_expert_bytes(self) -> int:
        """Of all experts."""
        return sum(s * n for s, n in zip(self.expert_bytes_L, self.n_experts_L, strict=True))


def traffic_of(plan: CheckpointPlan) -> Traffic:
    """Of a model that was understood; reads no weights. The types are those of the file, before
    anything is re-coded."""
    spec = plan.spec
    ffns = [layer.ffn for layer in spec.layers]
    native = [None if e is None else e[0] for e in plan.shapes]
    return Traffic(
        sum(w.n_bytes for w in dense_weights(plan)),
        tuple(0 if s is None else _native_bytes(s) for s in native),
        tuple(plan.n_experts_L),
        tuple(f.n_active if isinstance(f, MoeSpec) else 0 for f in ffns),
    )


def _native_bytes(shape: object) -> int:
    rows = shape.gate_row_bytes + shape.up_row_bytes  # type: ignore[attr-defined]
    return int(rows * shape.d_expert + shape.down_row_bytes * shape.d_model)  # type: ignore[attr-defined]


def dense_weights(plan: CheckpointPlan) -> list[PlannedWeight]:
    """The weights that every window reads whole."""
    tied = plan.spec.tied_head
    return [w for w in plan.weights.planned if not w.on_disk and (w.role != "embed" or tied)]


@dataclass(frozen=True)
class Limit:
    """The fastest that the measured bandwidths allow."""

    fast_bytes: float
    host_bytes: float
    seconds: float

    def share(self, seconds: float) -> float:
        """How much of the limit's speed a window of so many seconds reaches."""
        return self.seconds / seconds if seconds > 0 else 0.0


def limit_of(
    traffic: Traffic,
    distinct: Mapping[Place, float],
    bandwidths: Bandwidths,
    device: str,
) -> Limit:
    """distinct: experts per window by place, over all layers.

    On a GPU the larger of (dense + cached experts) / its memory and (other experts) / main memory
    read by CPU and link together; on the CPU all bytes / main memory.
    """
    size = traffic.mean_expert_bytes
    fast = traffic.dense_bytes + size * distinct.get(Place.FAST, 0.0)
    elsewhere: Sequence[Place] = (Place.PCIE, Place.CPU, Place.CPU_LATE)
    host = size * sum(distinct.get(place, 0.0) for place in elsewhere)
    if device != "cuda":
        return Limit(fast, host, (fast + host) / bandwidths.host)
    return Limit(fast, host, max(fast / bandwidths.gpu, host / max(bandwidths.both, 1.0)))
