"""Experts on NUMA nodes of a pretended machine (C15): equal shares, computed at home, reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import strata
from strata.experts import loader, nodes
from strata.experts.loader import empty_layers, load_experts
from strata.experts.nodes import shares, tell_pool
from strata.kernels.expert_rows import expert_rows_contract
from strata.native import CpuPool, pool
from strata.native.topology import Cpu, Topology, read_topology
from tests.experts.made_up import MadeUpExperts
from tests.kernels.test_linear import same_bits

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3_moe" / "q8_0.gguf"
SOURCE = MadeUpExperts(64, 96, 7, (("Q4_0", "Q8_0", "MXFP4"), None, ("Q8_0",) * 3))
HERE = read_topology().cpus[0].id
"""The one CPU of the pretended machine that is surely there."""
TWO_NODES = Topology((Cpu(HERE, HERE, 0), Cpu(HERE + 1, HERE + 1, 3)))


@pytest.mark.parametrize("n_nodes", [1, 2, 3, 8, 9])
def test_shares_are_equal_and_whole(n_nodes: int) -> None:
    """Every byte of a layer once, in order; numbers of experts differ by one at most."""
    layer = empty_layers(SOURCE.shapes())[0]
    found = list(shares(layer, range(n_nodes)))
    places = [(m.data_ptr(), m.numel()) for _, m in found]
    assert places[0][0] == layer.blobs.data_ptr()
    assert all(a + n == b for (a, n), (b, _) in zip(places, places[1:], strict=False))
    assert sum(n for _, n in places) == layer.n_bytes
    sizes = [m.shape[0] for _, m in found]
    assert max(sizes) - min(sizes) <= 1
    assert [node for node, _ in found] == sorted({node for node, _ in found})
    assert len(found) == min(n_nodes, 7)


def test_pages_are_asked_for_before_experts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts of each layer on node 0, four on node 3; the bytes are those of one node."""
    asked: list[tuple[int, int, bool]] = []

    def prefer(memory: torch.Tensor, node: int) -> bool:
        asked.append((node, memory.shape[0], bool(memory.any())))
        return True

    monkeypatch.setattr(nodes, "prefer_node", prefer)
    plain = load_experts(SOURCE.shapes(), SOURCE)
    assert not asked or len(read_topology().nodes) > 1
    asked.clear()
    monkeypatch.setattr(loader, "read_topology", lambda: TWO_NODES)
    store = load_experts(SOURCE.shapes(), SOURCE, workers=2)
    assert asked == [(0, 3, False), (3, 4, False)] * 2
    for layer in (0, 2):
        assert torch.equal(store.layer(layer).blobs, plain.layer(layer).blobs)


def test_the_pool_knows_and_computes_the_same() -> None:
    """One worker on node 0. Expectation: expert_rows_contract; tasks of the four experts on node 3
    are strays, and the report names bytes and workers of both nodes (C15)."""
    store = load_experts(SOURCE.shapes(), SOURCE)
    mine = CpuPool(1, [HERE], topology=TWO_NODES)
    tell_pool(mine, store)
    gib = [sum(k * store.layer(i).stride_bytes for i in (0, 2)) / 2**30 for k in (3, 4)]
    assert mine.affinity == [
        f"node 0: 1 workers on CPUs {HERE}, {gib[0]:.2f} GiB of experts",
        f"node 3: 0 workers, {gib[1]:.2f} GiB of experts",
    ]
    group = store.layer(2)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32))
    out, row = torch.empty(7, 64), np.arange(7, dtype=np.int32)
    start = np.arange(8, dtype=np.int32)
    mine.wait(mine.submit_experts(group.shape, x, group.addresses(), start, row, row, out))
    for expert in range(7):
        rows = slice(expert, expert + 1)
        same_bits(out[rows], expert_rows_contract(group.shape, group.blob(expert), x[rows]))
    assert 0 < mine.counters()["strays"] < mine.counters()["tasks"]
    mine.close()


def test_one_node_is_told_nothing() -> None:
    store = load_experts(SOURCE.shapes(), SOURCE)
    mine = CpuPool(1, [HERE], topology=Topology((Cpu(HERE, HERE, 0),)))
    tell_pool(mine, store)
    assert mine.affinity == [f"node 0: 1 workers on CPUs {HERE}"]
    mine.close()


def test_a_model_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectation: the logits of one node, bit for bit; the start-up report has a line a node."""
    ids = [5, 80, 9, 9, 200]
    with strata.load(FIXTURE, device="cpu", context=64, workers=2) as model:
        plain = model.logits(ids)
        if len(read_topology().nodes) == 1:
            assert not [line for line in model.report if line.startswith("node ")]
    for module in (loader, pool):
        monkeypatch.setattr(module, "read_topology", lambda: TWO_NODES)
    with strata.load(FIXTURE, device="cpu", context=64, workers=2) as model:
        assert np.array_equal(model.logits(ids), plain)
        lines = [line for line in model.report if line.startswith("node ")]
        layers = [layer for layer in model.engine.service.tier._store.layers if layer]
        half = sum(layer.n_bytes for layer in layers) / 2 / 2**30
    assert lines == [
        f"node {node}: 1 workers on CPUs {cpu}, {half:.2f} GiB of experts"
        for node, cpu in ((0, HERE), (3, HERE + 1))
    ]
