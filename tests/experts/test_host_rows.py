"""The CPU's part of a prompt's experts.

Expectations: the same rows computed one at a time by the pool (whose bits do not depend on how many
it is given), and what a worker that fails or is slow leaves behind.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from strata.core.errors import EngineError
from strata.core.types import Place
from strata.experts import host_rows
from strata.experts.fast_tier import FastTier
from strata.experts.host_rows import LEAST_ROWS, MOST_BYTES, HostRows, batches
from strata.experts.loader import load_experts
from strata.experts.stream import LayerStream, first_missing
from strata.experts.workers import DelayedWorker, PoolWorker
from strata.kernels.expert_rows.triton_gemm import groups_of_rows
from strata.kernels.plan import Groups
from strata.native import CpuPool
from tests.experts.made_up import MadeUpExperts

WIDTH, EXPERTS, ACTIVE, TOKENS = 64, 8, 3, 5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store():
    source = MadeUpExperts(WIDTH, 32, EXPERTS, (None, ("Q8_0",) * 3))
    return load_experts(source.shapes(), source)


@pytest.fixture
def pool():
    with_two = CpuPool(workers=2)
    yield with_two
    with_two.close()


def host_of(worker) -> HostRows:
    service = SimpleNamespace(workers={Place.CPU: worker})
    return HostRows(service, CPU, WIDTH, [0, ACTIVE])


def worker_of(pool, store) -> PoolWorker:
    return PoolWorker(pool, store, lambda layer, expert_G: store.layer(layer).addresses()[expert_G])


def chunk(seed: int):
    """Inputs, and three experts of each token; expert 2 is nobody's."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((TOKENS, WIDTH)).astype(np.float32))
    others = [e for e in range(EXPERTS) if e != 2]
    experts = np.stack([rng.permutation(others)[:ACTIVE] for _ in range(TOKENS)])
    return x, torch.from_numpy(experts.astype(np.int32).reshape(-1))


def one_by_one(pool, store, x, expert_R, taken_E) -> dict[int, np.ndarray]:
    layer, found, one = store.layer(1), {}, np.zeros(1, np.int32)
    for row, expert in enumerate(expert_R.tolist()):
        if taken_E[expert]:
            out = torch.empty(1, WIDTH)
            token = np.array([row // ACTIVE], np.int32)
            address, ends = layer.addresses()[expert : expert + 1], np.array([0, 1], np.int32)
            pool.wait(pool.submit_experts(layer.shape, x, address, ends, one, token, out))
            found[row] = out.numpy()[0]
    return found


@pytest.mark.parametrize(("delay_s", "least_rows"), [(0.0, LEAST_ROWS), (0.02, 1), (0.0, 1)])
def test_rows_of_the_cpu_arrive_and_others_stay(
    pool, store, delay_s: float, least_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_rows, "LEAST_ROWS", least_rows)
    host = host_of(DelayedWorker(worker_of(pool, store), {1: delay_s}))
    taken = np.array([1, 0, 1, 0, 1, 1, 0, 1], bool)
    host.begin(TOKENS)
    for seed in range(2):
        x, expert_R = chunk(seed)
        host.hand(1, x, groups_of_rows(expert_R, ACTIVE, torch.ones(EXPERTS, dtype=torch.int64)))
        assert (host.counts() == np.bincount(expert_R, minlength=EXPERTS)).all()
        assert (host.start(1, taken).numpy() == taken).all()
        rows = torch.full((TOKENS * ACTIVE, WIDTH), 7.0)
        host.join(1, rows)
        expected = one_by_one(pool, store, x, expert_R, taken)
        assert 0 < len(expected) < len(rows)
        for row, got in enumerate(rows.numpy()):
            assert np.array_equal(got, expected.get(row, np.full(WIDTH, 7.0, np.float32)))
    assert len(host.times.seconds) == 2 and min(map(abs, host.times.seconds)) >= delay_s


class Broken:
    def begin(self, *args) -> None:
        pass

    def finish_first(self, layer: int) -> None:
        pass

    def finish(self, layer: int) -> None:
        raise EngineError("a worker failed")


def test_a_failing_pool_is_told_and_keeps_nobody_waiting(pool, store) -> None:
    """Expectation: the error comes out once, the device's word is raised all the same, and the next
    chunk works."""
    host = host_of(Broken())
    x, expert_R = chunk(0)
    groups = groups_of_rows(expert_R, ACTIVE, torch.ones(EXPERTS, dtype=torch.int64))
    every = np.ones(EXPERTS, bool)
    host.begin(TOKENS)
    host.hand(1, x, groups)
    host.counts()
    host.start(1, every)
    with pytest.raises(EngineError, match="a worker failed"):
        host.settle()
    assert host.ready() == host.awaited()
    host.abandon()
    host._service.workers[Place.CPU] = worker_of(pool, store)
    host.begin(TOKENS)
    host.hand(1, x, groups)
    host.counts()
    host.start(1, every)
    rows = torch.zeros(TOKENS * ACTIVE, WIDTH)
    host.join(1, rows)
    assert (rows.abs().sum(dim=1) > 0).all()


def test_chunks_whose_rows_would_not_fit() -> None:
    host = host_of(None)
    most = MOST_BYTES // (4 * ACTIVE * WIDTH)
    assert host.fits(most) and not host.fits(most + 1)


def test_many_rows_are_handed_over_in_pieces() -> None:
    """Expectation: the pieces one after the other are the whole, each of whole experts."""
    count = np.full(64, LEAST_ROWS // 32, np.int32)
    start = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    order = np.arange(start[-1], dtype=np.int32)
    whole = Groups(np.arange(64, dtype=np.int32), start, order, order[::-1].copy())
    parts = list(batches(whole))
    assert len(parts) == 3 and parts[0].n_rows < parts[1].n_rows < parts[2].n_rows
    for name in ("expert_G", "row", "token"):
        got = np.concatenate([getattr(part, name) for part in parts])
        assert (got == getattr(whole, name)).all()
    assert all(part.start[0] == 0 and part.start[-1] == part.n_rows for part in parts)
    few = Groups(np.arange(2, dtype=np.int32), start[:3], order[: start[2]], order[: start[2]])
    assert [part.n_rows for part in batches(few)] == [few.n_rows]


def test_a_part_of_the_missing_experts_is_copied_unasked(store) -> None:
    """By hand: of 7 missing, a part of 0.4 is 2.8, rounded to 3, the first ones."""
    missing = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    assert first_missing(missing, 0.4).tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert not first_missing(missing, 0.0).any()
    assert (first_missing(missing, 1.0) == missing).all()
    tier = FastTier(store, 2)
    tier.impose([(1, 7), (1, 0)])
    stream = LayerStream(store, tier, CPU)
    stream.begin(0.5)
    assert stream.open_LE[1].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert stream.missing(1).tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    stream.begin()
    assert not stream.open_LE[1].any()
