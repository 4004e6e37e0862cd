"""Time of one token's attention over f16, int8 and q4 caches on a GPU, one layer, in a CUDA graph.

PYTHONPATH=src python3 bench/gpu_kv.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from strata.kernels.attention.triton import attention, new_scratch
from strata.kernels.kv_quant import encode, group_of
from strata.kernels.kv_quant.triton import KvScales

SHAPES = ((4096, 16, 2, 256), (32768, 16, 2, 256), (32768, 32, 4, 128), (131072, 16, 2, 256))
"""Positions, query heads, key/value heads, numbers of a head."""
LAUNCHES = 20


def micros(run: Callable[[], None]) -> float:
    """Best of seven replays, per launch of the pair."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    times = []
    for _ in range(7):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / LAUNCHES * 1e3)
    return min(times)


def caches(x_nGd: torch.Tensor, kv: str) -> tuple[torch.Tensor, KvScales | None, float]:
    """A cache of that kind, its scales, and bytes of a number."""
    if kv == "f16":
        return x_nGd.half(), None, 2.0
    bits = 8 if kv == "int8" else 4
    group = group_of(bits, x_nGd.shape[-1])
    codes, scale = encode(x_nGd, bits, group)
    return codes, KvScales(scale, scale.clone()), bits / 8 + 2 / group


def measure(n: int, heads: int, groups: int, dim: int) -> None:
    """All kinds and chunks of one shape."""
    q = torch.randn(1, heads, dim, device="cuda")
    pos = torch.tensor([n - 1], dtype=torch.int32, device="cuda")
    out, x = torch.empty_like(q), torch.randn(n, groups, dim, device="cuda")
    scratch = new_scratch(1, heads, 128 // groups, dim, "cuda")
    for kv in ("f16", "int8", "q4"):
        k, scales, n_bytes = caches(x, kv)
        v = k.clone()
        for chunk in (32, 64, 128) if n == 32768 else (64,):
            given: dict[str, Any] = {"chunk": chunk, "scales": scales}
            us = micros(partial(attention, q, k, v, pos, dim**-0.5, scratch, out, **given))
            rate = 2 * n * groups * dim * n_bytes / us / 1e3
            where = f"n={n} H={heads} G={groups} D={dim} {kv} chunk={chunk}"
            print(f"{where}: {us:.1f} us, {rate:.0f} GB/s")


if __name__ == "__main__":
    for shape in SHAPES:
        measure(*shape)
