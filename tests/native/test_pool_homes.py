"""Experts on NUMA nodes (a pretended topology), counters by layer, and many batches at once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from strata.core.errors import EngineError, SettingError
from strata.native import CpuPool
from strata.native.topology import Cpu, Topology
from tests.kernels.test_linear import same_bits
from tests.native.kit import Batch, make_batch
from tests.native.test_experts import SHAPES

TWO_NODES = Topology((Cpu(0, 0, 0), Cpu(1, 1, 3)))


def placed(batch: Batch, mine: CpuPool, node_of: dict[int, int]) -> None:
    """Tell the pool where each of the batch's experts lies."""
    for expert in batch.expert:
        mine.set_node(batch.blobs[int(expert)], node_of[int(expert)])


@pytest.mark.parametrize("node", [0, 3])
def test_tasks_run_at_home_unless_nobody_is_there(node: int) -> None:
    """One worker on one of two nodes. Expectation: it runs all tasks, those of the other node's
    experts (half of them, equal in size) counted as strays, and the rows are the contract's."""
    cpu = 0 if node == 0 else 1
    mine = CpuPool(1, [cpu], topology=TWO_NODES)
    batch = make_batch(SHAPES["plain"], 6, 6, 6)
    placed(batch, mine, {e: 3 * (e % 2) for e in range(6)})
    same_bits(batch.run(mine), batch.expected())
    mine.close()
    counted = mine.counters()
    assert counted["strays"] == counted["tasks"] // 2 > 0


def test_all_at_home() -> None:
    """Everything on the one worker's node. Expectation: no strays."""
    mine = CpuPool(1, [1], topology=TWO_NODES)
    batch = make_batch(SHAPES["plain"], 4, 3, 2)
    placed(batch, mine, dict.fromkeys(range(4), 3))
    same_bits(batch.run(mine), batch.expected())
    assert mine.counters()["strays"] == 0 and mine.counters()["tasks"] > 0
    mine.close()


def test_stress_with_homes() -> None:
    """Three threads, 5 workers on two nodes, on-time and late batches. Expectation: each time the
    contract's rows, and every batch counted once in its layer."""
    mine = CpuPool(5, [0, 1, 0, 1, 0], spin_us=20, topology=TWO_NODES)
    mine.count_layers(3)
    batches = [make_batch(SHAPES["plain"], 5, t + 1, 2, seed=t) for t in range(3)]
    expected = [batch.expected() for batch in batches]
    for t, batch in enumerate(batches):
        placed(batch, mine, {e: 3 * ((e + t) % 2) for e in range(5)})
    failed: list[str] = []

    def caller(t: int) -> None:
        rng = np.random.default_rng(t)
        batch = batches[t]
        for turn in range(60):
            outs = [batch.out() for _ in range(1 + turn % 3)]
            tickets = [
                mine.submit_experts(
                    batch.shape, batch.x_TD, batch.address, batch.start, batch.row, batch.token,
                    out, bool(rng.integers(2)), t,
                )
                for out in outs
            ]  # fmt: skip
            if turn % 10 == 0:
                time.sleep(0.001)
            for ticket, out in zip(reversed(tickets), reversed(outs), strict=True):
                mine.wait(ticket)
                if not torch.equal(out, expected[t]):
                    failed.append(f"caller {t}, turn {turn}")

    threads = [threading.Thread(target=caller, args=(t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine.close()
    assert not failed
    layers = mine.layer_counters()
    assert [layer["works"] for layer in layers] == [120, 120, 120]
    for name in ("plan_ns", "quantize_ns", "compute_ns"):
        assert all(layer[name] > 0 for layer in layers), name
        assert sum(layer[name] for layer in layers) == mine.counters()[name], name


def test_refused_placements() -> None:
    """Expectation: one clear line each."""
    mine = CpuPool(2, [0, 1], topology=TWO_NODES)
    memory = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(SettingError, match=r"NUMA node 1 has no CPU of this pool; nodes: \(0, 3\)"):
        mine.set_node(memory, 1)
    mine.set_node(memory[:2048], 0)
    with pytest.raises(EngineError, match="placed on a node twice"):
        mine.set_node(memory[1024:], 3)
    mine.set_node(memory[2048:], 3)
    mine.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_measured_handover_and_reading(workers: int) -> None:
    """Expectation: one positive time a job, every worker's part of each job counted as a task, and
    a pass reads all bytes (the sum of words is NumPy's)."""
    mine = CpuPool(workers, spin_us=50)
    times = mine.measure_handover(12, pause_us=100)
    assert len(times.native_us) == len(times.python_us) == 12
    assert (times.native_us > 0).all() and (times.python_us > 0).all()
    assert mine.counters()["tasks"] == 24 * workers
    with pytest.raises(SettingError, match="0 jobs"):
        mine.measure_handover(0)
    words = np.random.default_rng(0).integers(0, 2**60, 100_003, np.uint64)
    memory = torch.from_numpy(words.view(np.int64))
    assert all(seconds > 0 for seconds in mine.measure_read(memory, 2))
    assert mine._pool.read(memory.data_ptr(), words.nbytes)[1] == int(words.sum(dtype=np.uint64))
    with pytest.raises(EngineError, match="contiguous"):
        mine.measure_read(memory[::2])
    mine.close()
