"""Whole experts through the pool, as a layer of a model meets them: gate, up and down of the chosen
experts, activations quantized in between.

512 experts of 640 x 2560 as in the largest model we know of, 10 of them for a token; every expert
is computed for as many rows as asked, the most work that a window of so many tokens can give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from strata.bench.cpu_measure import Variant, rates, ratio, read_variant, spread, take_turns
from strata.bench.cpu_memory import random_rows
from strata.core.errors import SettingError
from strata.experts.nodes import place_on_nodes, tell_pool
from strata.experts.store import ExpertLayer, ExpertStore, anonymous, stride_of
from strata.formats.tile_formats import tile_format
from strata.formats.tiles import Layout
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import layout
from strata.native import CpuPool
from strata.native.recode import encode_into
from strata.native.topology import read_topology

EXPERTS, ACTIVE = 512, 10
D_MODEL, D_EXPERT = 2560, 640
DOWN_TYPE = "IQ4_NL"
"""Of experts whose own type has blocks that 640 columns are no multiple of, as published files
have it."""


def down_type(name: str) -> str:
    """Type of the down matrix beside gate and up of that type."""
    return DOWN_TYPE if D_EXPERT % TYPES[name].block_weights else name


def measure_experts(
    pools: Sequence[CpuPool],
    name: str,
    rows: Sequence[int],
    n_experts: int,
    free_bytes: int,
    seconds: float,
    memory: torch.Tensor,
) -> list[dict[str, Any]]:
    """One type in both layouts with each pool; lines of the JSON.

    memory: to read from beside them, larger than the caches; there are more experts than asked
    where these would not be. SettingError when they do not fit.
    """
    layouts: tuple[Layout, ...] = ("native", "tiles") if tile_format(name) else ("native",)
    made = {how: make_experts(name, how, n_experts, memory.numel(), free_bytes) for how in layouts}
    lines = []
    for pool in pools:
        tell_pool(pool, ExpertStore(list(made.values())))
        n_bytes = min(ACTIVE * made["native"].shape.weight_bytes, memory.numel() // 4)
        variants = [read_variant(("read", 0), pool, memory, n_bytes)]
        for how, experts in made.items():
            n_bytes = ACTIVE * experts.shape.weight_bytes
            variants += [Variant((how, n), n_bytes, _run(pool, experts, n)) for n in rows]
        lines += expert_lines(name, pool, variants, take_turns(variants, seconds))
    return lines


def expert_lines(
    name: str,
    pool: CpuPool,
    variants: Sequence[Variant[tuple[str, int]]],
    times: dict[tuple[str, int], list[float]],
) -> list[dict[str, Any]]:
    """One line for each layout and number of rows. us: of one layer's experts."""
    read = variants[0]
    read_s = [s / read.n_bytes for s in times[read.key]]
    return [
        {
            "types": [name, name, down_type(name)],
            "layout": v.key[0],
            "kernels": pool.isa,
            "threads": pool.workers,
            "rows": v.key[1],
            "gb_s": rates(v.n_bytes / 1e9, times[v.key]).as_dict(2),
            "share": round(ratio(read_s, [s / v.n_bytes for s in times[v.key]]), 3),
            "share_best": round(min(read_s) * v.n_bytes / min(times[v.key]), 3),
            "layer_us": spread([1e6 * s for s in times[v.key]]).as_dict(1),
        }
        for v in variants[1:]
    ]


def make_experts(
    name: str, how: Layout, n_experts: int, least_bytes: int, free_bytes: int
) -> ExpertLayer:
    """The same random expert as often as asked, more often to fill least_bytes; each in memory of
    its own."""
    down = down_type(name)
    shape = layout(D_MODEL, D_EXPERT, (name, name, down), layouts=(how, how, how))
    n_experts = max(n_experts, -(-least_bytes // stride_of(shape)))
    n_bytes = n_experts * stride_of(shape)
    if 2 * n_bytes > 0.9 * free_bytes:
        raise SettingError(
            f"{n_experts} {name} experts take {n_bytes >> 20} MiB in each layout and "
            f"{free_bytes >> 20} MiB are free; give fewer with --experts, or 0 to leave them out"
        )
    memory = anonymous(n_bytes).view(n_experts, -1)
    made = ExpertLayer(shape, stride_of(shape), memory)
    place_on_nodes(made, read_topology().nodes)
    rng = np.random.default_rng(1)
    offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
    sizes = ((D_EXPERT, D_MODEL), (D_EXPERT, D_MODEL), (D_MODEL, D_EXPERT))
    for kind, offset, size, length in zip(
        shape.types, offsets, sizes, shape.matrix_bytes, strict=True
    ):
        place = memory[0, offset : offset + length].numpy()
        raw = random_rows(kind, *size, rng)
        if how == "tiles":
            encode_into(kind, raw, place)
        else:
            place[:] = raw.reshape(-1)
    memory[1:].copy_(memory[0])
    return made


def _run(pool: CpuPool, experts: ExpertLayer, n: int) -> Callable[[int], float]:
    """Seconds of one layer; no expert comes again before nearly all others came."""
    order = np.random.default_rng(2).permutation(experts.addresses())
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((n, D_MODEL)).astype(np.float32))
    start = np.arange(0, n * ACTIVE + 1, n, dtype=np.int32)
    row = np.arange(n * ACTIVE, dtype=np.int32)
    token = np.tile(np.arange(n, dtype=np.int32), ACTIVE)
    out = torch.empty(n * ACTIVE, D_MODEL)
    cursor = 0

    def run(sample: int) -> float:
        nonlocal cursor
        if cursor + ACTIVE > len(order):
            cursor = 0
        addresses = order[cursor : cursor + ACTIVE]
        cursor += ACTIVE
        begin = time.perf_counter()
        pool.wait(pool.submit_experts(experts.shape, x, addresses, start, row, token, out))
        return time.perf_counter() - begin

    return run
