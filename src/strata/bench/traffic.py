"""Bytes that a window must move, in the file's own types, and the time that takes at least.

Counted are dense weights (less the embedding, of which a token reads one row) and distinct routed
experts; keys, values and recurrent state are not.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """What a window moves by where it is read, and the fastest that the measured bandwidths allow.

    dense and cached experts: of the fast device's memory (on the CPU alone: main memory too). cpu,
    link: experts read in main memory by the CPU, and by the GPU over the link.
    """

    dense_bytes: float
    cached_bytes: float
    cpu_bytes: float
    link_bytes: float
    seconds: float

    @property
    def fast_bytes(self) -> float:
        """Of the fast device's memory."""
        return self.dense_bytes + self.cached_bytes

    @property
    def host_bytes(self) -> float:
        """Of experts outside the fast tier."""
        return self.cpu_bytes + self.link_bytes

    def share(self, seconds: float) -> float:
        """How much of the limit's speed a window of so many seconds reaches."""
        return self.seconds / seconds if seconds > 0 else 0.0

    def line(self, seconds: float, laid_out: float) -> str:
        """For people. laid_out: bytes of the experts as they lie in memory, per byte of the
        file."""
        return (
            f"a window moves {self.dense_bytes / 1e9:.3f} GB of dense weights and "
            f"{self.cached_bytes / 1e9:.3f} GB of cached experts; of the others the CPU reads "
            f"{self.cpu_bytes / 1e9:.3f} GB and the link moves {self.link_bytes / 1e9:.3f} GB: at "
            f"least {1e3 * self.seconds:.2f} ms, measured {1e3 * seconds:.2f} ms, "
            f"{self.share(seconds):.1%} of the limit (bytes of the file; in memory experts take "
            f"{laid_out:.2f} times as many)"
        )


def limit_of(
    traffic: Traffic,
    distinct: Mapping[Place, float],
    bandwidths: Bandwidths,
    device: str,
) -> Limit:
    """distinct: experts per window by place, over all layers.

    On a GPU the larger of (dense + cached experts) / its memory and (other experts) / main memory
    as the machine reads it fastest: by the CPU, the link, or both; on the CPU all bytes / main
    memory.
    """
    size = traffic.mean_expert_bytes
    cached, link, *cpu = (
        size * distinct.get(p, 0.0) for p in (Place.FAST, Place.PCIE, Place.CPU, Place.CPU_LATE)
    )
    fast, host = traffic.dense_bytes + cached, link + sum(cpu)
    if device == "cuda":
        of_host = max(bandwidths.both, bandwidths.host, bandwidths.link, 1.0)
        seconds = max(fast / bandwidths.gpu, host / of_host)
    else:
        seconds = (fast + host) / bandwidths.host
    return Limit(traffic.dense_bytes, cached, sum(cpu), link, seconds)
