"""State repair in a device's windows; in CI two windows through Triton's interpreter.

Expectations: the CPU engine in the same mode (itself equal to a decoder with explicit states,
tests/window/test_repair.py), within 1e-3 of the largest logit.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.engine.test_device_engine import (
    FIXTURES,
    INTERPRETED,
    gpu,
    near,
    needs_gpu,
    on_device,
    tokens_of,
)

import strata


def both(family: str, device: str, window: int, n_tokens: int, **given: object) -> None:
    """Windows with random acceptance on both engines; every row compared."""
    path = FIXTURES / family / "bf16.gguf"
    rng, text = random.Random(window), tokens_of(family, n_tokens)
    engine = on_device(path, device, pcie_frac=0.0, **given)
    with strata.load(path, device="cpu", context=128, **given) as model:
        while (at := engine.length) < n_tokens:
            n = min(rng.randint(1, window), n_tokens - at)
            tokens = text[at : at + n] + [rng.randrange(8, 300) for _ in range(window - n)]
            ours, theirs = engine.run_window(tokens), model.engine.run_window(tokens)
            assert near(ours, theirs), f"window at {at}"
            engine.commit(n)
            model.engine.commit(n)
    engine.close()


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_repair_through_the_interpreter_equals_the_cpu_engine() -> None:
    both("qwen3_moe", "cpu", 1, 2, expert_cache=3, defer_cpu="repair")


@gpu
@needs_gpu
@pytest.mark.parametrize(
    "family", ["qwen4_exp", "qwen3_next", "qwen3_moe", "gpt_oss", "deepseek_v3"]
)
@pytest.mark.parametrize("window", [1, 4])
def test_repair_equals_the_cpu_engine(family: str, window: int) -> None:
    both(family, "cuda", window, 30, expert_cache=6, defer_cpu="repair")


@gpu
@needs_gpu
def test_rows_split_by_weight_are_repaired() -> None:
    both("qwen4_exp", "cuda", 3, 24, expert_cache=6, defer_cpu="repair", defer_cpu_below=0.34)


@gpu
@needs_gpu
def test_a_request_chooses_on_a_device_too() -> None:
    """Each choice gives the bits of an engine loaded that way, and exact is exact."""
    path, tokens = FIXTURES / "qwen4_exp" / "bf16.gguf", tokens_of("qwen4_exp", 16)
    wanted = {}
    for name, given in (("exact", {}), ("fast", {"defer_cpu": "repair"})):
        engine = on_device(path, "cuda", expert_cache=0, pcie_frac=0.0, **given)
        wanted[name] = engine.logits(tokens, through="windows", window=2)
        engine.close()
    assert not np.array_equal(wanted["exact"], wanted["fast"])
    engine = on_device(path, "cuda", expert_cache=0, pcie_frac=0.0, defer_cpu="repair")
    for name in ("exact", "fast", "exact"):
        back = engine.select(name)
        assert np.array_equal(engine.logits(tokens, through="windows", window=2), wanted[name])
        back()
    engine.close()
