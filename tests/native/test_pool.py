"""The pool's life: idle without CPU, closed, forked, refused; results under a flushing caller."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import time
import weakref

import numpy as np
import pytest
import torch

from strata.core.errors import EngineError
from strata.kernels.linear import linear_contract
from strata.kernels.weight import Weight
from strata.native import CpuPool
from strata.native.topology import Cpu, Topology
from tests.kernels.test_linear import make_weight, same_bits
from tests.native.kit import make_batch, pool
from tests.native.test_experts import SHAPES


def test_idle_pool_uses_no_cpu() -> None:
    """After its spin time. Expectation: process CPU time stands still (under 3 % of one core)."""
    mine = CpuPool(4, spin_us=200)
    make_batch(SHAPES["plain"], 4, 3, 2).run(mine)
    time.sleep(0.05)
    started, cpu = time.perf_counter(), time.process_time()
    time.sleep(0.5)
    used = time.process_time() - cpu
    assert used < 0.03 * (time.perf_counter() - started)
    assert mine.counters()["sleeps"] >= 3
    mine.close()


def test_no_more_spinners_than_cpus() -> None:
    """With one usable CPU no worker spins, however long the spin time. Expectation: CPU time."""
    mine = CpuPool(3, spin_us=10_000_000, topology=Topology((Cpu(0, 0, 0),)))
    time.sleep(0.05)
    cpu = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - cpu < 0.02
    mine.close()


@pytest.mark.parametrize("spin_us", [0, 1, 1000])
def test_sleeping_workers_are_woken(spin_us: int) -> None:
    """Pauses longer and shorter than the spin. Expectation: linear_contract every time."""
    mine = CpuPool(3, spin_us=spin_us)
    w = make_weight("Q8_0", 500, 320, np.random.default_rng(0))
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 320)).astype(np.float32))
    expected = linear_contract(x, w)
    for i in range(200):
        assert torch.equal(mine.linear(w, x), expected)
        if i % 20 == 0:
            time.sleep(0.002)
    mine.close()


def test_closed_pool() -> None:
    """Close ends what is in flight; later calls say so. Expectation: rows written, clear error."""
    mine = CpuPool(2)
    batch = make_batch(SHAPES["plain"], 4, 3, 2)
    out = batch.out()
    ticket = batch.submit(mine, out)
    mine.close()
    mine.close()
    same_bits(out, batch.expected())
    with pytest.raises(EngineError, match="closed; make a new CpuPool"):
        mine.wait(ticket)
    with pytest.raises(EngineError, match="closed"):
        batch.submit(mine, out)


def test_dropped_pool_ends_its_threads() -> None:
    """Expectation: the object is collected and the process has its former number of threads."""
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().num_threads()
    mine = CpuPool(5)
    assert psutil.Process().num_threads() == before + 4
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None and psutil.Process().num_threads() == before


@pytest.mark.parametrize("ticket", [0, 63, 2**40])
def test_unknown_ticket(ticket: int) -> None:
    """Expectation: an error that names it, not a wait for ever."""
    with pytest.raises(EngineError, match=f"ticket {ticket} was never given out"):
        pool().wait(ticket)


def test_denormals_are_kept_whatever_the_caller_flushes() -> None:
    """A flushing calling thread changes no bits. Expectation: linear_contract."""
    values = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32) * 1e-30
    w = Weight("F32", 64, 64, torch.from_numpy(values.view(np.uint8)))
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((2, 64)).astype(np.float32))
    x *= 1e-10
    expected = linear_contract(x, w)
    assert (expected.abs() < 2e-38).any() and (expected != 0).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        got = [pool("auto", workers).linear(w, x) for workers in (1, 2)]
    finally:
        torch.set_flush_denormal(False)
    for y in got:
        same_bits(y, expected)


def test_fork() -> None:
    """In a forked child the old pool refuses, a new one works, and both processes end."""
    script = """
        import os, sys, time
        import numpy as np, torch
        from strata.core.errors import EngineError
        from strata.kernels.weight import Weight
        from strata.native import CpuPool

        w = Weight("F32", 400, 64, torch.ones(400, 64).view(torch.uint8))
        x = torch.ones(2, 64)
        pool = CpuPool(3)
        assert (pool.linear(w, x) == 64).all()
        time.sleep(0.05)  # the workers sleep: the child inherits their lock's waiters
        child = os.fork()
        if child == 0:
            try:
                pool.linear(w, x)
            except EngineError as error:
                assert "before the process forked" in str(error), error
            else:
                os._exit(1)
            pool.close()
            new = CpuPool(3)
            assert (new.linear(w, x) == 64).all()
            del pool
            sys.exit(0)
        status = os.waitpid(child, 0)[1]
        assert status == 0, status
        assert (pool.linear(w, x) == 64).all()
        print("done")
    """
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0 and "done" in result.stdout, result.stderr
