"""What a GPU's memory is divided into; the plan before loading and the loading itself go by it."""

from __future__ import annotations

from collections.abc import Sequence

from strata.experts.layouts import Entry
from strata.experts.store import stride_of
from strata.experts.stream import BUFFERS, STAGE_BYTES
from strata.kernels.gpu_weight import gpu_bytes
from strata.models.inventory import inventory
from strata.models.spec import ModelSpec
from strata.models.weights import PlannedWeight

RESERVE_BYTES = (384 << 20) + STAGE_BYTES
"""Left alone: graphs, compiled kernels, what the driver takes later, and experts on their way."""


def dense_bytes(spec: ModelSpec, planned: Sequence[PlannedWeight]) -> int:
    """Weights that lie on the device, as they lie there."""
    kinds = inventory(spec)
    total = 0
    for weight in planned:
        if weight.on_disk:
            continue
        if kinds[weight.role].kind == "matrix":
            total += gpu_bytes(weight.type, *weight.shape)
        else:
            total += weight.n_bytes
    return total


def pairs_and_slot(shapes: Sequence[Entry]) -> tuple[int, int]:
    """(layer, expert) pairs in all, and the bytes of a slot that holds any of them."""
    entries = [e for e in shapes if e is not None]
    return sum(n for _, n in entries), max((stride_of(shape) for shape, _ in entries), default=0)


def staging_bytes(shapes: Sequence[Entry]) -> int:
    """Buffers that experts pass through while a prompt is read."""
    layers = [stride_of(shape) * n for shape, n in (e for e in shapes if e is not None)]
    return BUFFERS * max(layers, default=0)


def staging_beside(shapes: Sequence[Entry], slots: int, room: int) -> int:
    """Bytes of such buffers beside that many cached experts; 0 when every expert is cached, and
    when they do not fit (prompts then go through windows)."""
    n_pairs, slot_bytes = pairs_and_slot(shapes)
    staging = staging_bytes(shapes)
    fits = slots * slot_bytes + staging <= room
    return staging if fits and slots < n_pairs else 0


def slots_in(shapes: Sequence[Entry], room: int) -> int:
    """Experts that fit into ``room`` bytes: all of them, or what the staging buffers leave."""
    n_pairs, slot_bytes = pairs_and_slot(shapes)
    if n_pairs * slot_bytes <= room:
        return n_pairs
    staging = staging_bytes(shapes)
    if 2 * staging > room:
        staging = 0
    return max(0, room - staging) // slot_bytes
