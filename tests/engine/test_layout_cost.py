"""The start-up measurement: the slower of kernel and memory decides, each pair measured once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.engine import layout_cost
from strata.engine.layout_cost import MeasuredCost, read_speed
from strata.formats.tiles import encode
from strata.formats.weight_types import TYPES
from strata.native import CpuPool


class ScriptedPool:
    """Products that take scripted times on a clock of their own."""

    workers = 3

    def __init__(self, seconds_per_weight):
        self.now, self.calls = 0.0, []
        self._seconds = seconds_per_weight

    def linear(self, w, x_TK):
        self.calls.append((w.type, w.layout))
        assert w.data_shape() == tuple(w.data.shape)
        # the first product after another is slower: caches are cold
        warm = self.calls[-2:-1] == self.calls[-1:]
        self.now += w.n_rows * w.n_cols * self._seconds[w.layout] * (1 if warm else 9)
        return torch.zeros(1, w.n_rows)

    def clock(self):
        return self.now


def test_the_slower_of_kernel_and_memory():
    """IQ3_S takes 3.4375 bits a weight in rows and 4.3125 in tiles (decision 003)."""
    pool = ScriptedPool({"native": 1e-9, "tiles": 1e-12})
    cost = MeasuredCost(pool, 1e9, pool.clock)
    assert cost("IQ3_S", "native") == pytest.approx(1e-9)  # memory: 0.43 ns
    assert cost("IQ3_S", "tiles") == pytest.approx(4.3125 / 8 * 1e-9)
    assert cost("IQ3_S", "native") == pytest.approx(1e-9)
    assert len(pool.calls) == 12  # a warm-up and five repeats of each pair
    assert cost.lines() == [
        "measured here: 1.0 GB/s of memory; 1e9 weights/s as tiles/native: IQ3_S 1.9/1.0"
    ]
    assert MeasuredCost(pool, 1e9).lines() == []


def test_the_matrices_are_ordinary():
    """Finite products for every type, or times would be those of NaN or subnormal numbers."""
    seen = []

    class Pool(ScriptedPool):
        def linear(self, w, x_TK):
            seen.append(w)
            return super().linear(w, x_TK)

    pool = Pool({"native": 1.0, "tiles": 1.0})
    cost = MeasuredCost(pool, 1e9, pool.clock)
    for kind in TYPES.values():
        if kind.kind == "quantized":
            cost(kind.name, "native")
            native = seen[-1]
            cost(kind.name, "tiles")
            tiles = seen[-1]
            assert tiles.data.data_ptr() % 128 == 0
            np.testing.assert_array_equal(
                tiles.data.numpy(), encode(kind.name, native.data.numpy())
            )
            part = native.dequantize(slice(0, 8))
            assert np.isfinite(part).all() and np.abs(part).max() > 2.0**-100


def test_memory_that_is_read_has_a_limit(monkeypatch):
    """Expectation: the limit where it is the smaller, never nothing; else 256 MiB or more."""
    sizes = []

    class Pool:
        def __init__(self, workers):
            pass

        def measure_read(self, memory, times):
            sizes.append(memory.numel())
            return [2.0, 0.5, 1.0]

        def close(self):
            sizes.append("closed")

    monkeypatch.setattr(layout_cost, "CpuPool", Pool)
    assert read_speed(2, 8 << 20) == (8 << 20) / 0.5
    assert read_speed(2, 5) == (1 << 20) / 0.5
    assert sizes == [8 << 20, "closed", 1 << 20, "closed"]
    monkeypatch.setattr(layout_cost, "_READ_BYTES", 3 << 20)
    monkeypatch.setattr(layout_cost, "cache_bytes", lambda: 2 << 20)
    assert read_speed(2) == (5 << 20) / 0.5


def test_here():
    """Real numbers of this machine are positive and faster than a weight a microsecond."""
    pool = CpuPool(1)
    cost = MeasuredCost(pool, read_speed(1))
    layouts = ("native", "tiles") if getattr(CpuPool, "reads_tiles", False) else ("native",)
    assert all(0 < cost("Q4_K", layout) < 1e-6 for layout in layouts)
    pool.close()
