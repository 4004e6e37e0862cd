"""Keys and values as codes of 8 and 4 bits on a device, end to end.

Expectations: the CPU engine with the same codes; bits of the same engine under other windows,
caches and rejected tokens.
"""

from __future__ import annotations

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
from tests.engine.test_exactness import windows_with_rejections

import strata
from strata.engine.model import Model


def on_cpu(family: str, tokens: list[int], kv: str) -> np.ndarray:
    with strata.load(FIXTURES / family / "bf16.gguf", device="cpu", context=128, kv=kv) as model:
        return model.logits(tokens, through="windows", window=2)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_a_window_through_the_interpreter_equals_the_cpu_engine() -> None:
    tokens = tokens_of("qwen3_moe", 2)
    engine = on_device(FIXTURES / "qwen3_moe" / "bf16.gguf", "cpu", expert_cache=-1, kv="q4")
    ours = engine.logits(tokens, through="windows", window=2)
    engine.close()
    assert near(ours, on_cpu("qwen3_moe", tokens, "q4"))
    assert any(line.startswith("keys and values: q4, ") for line in engine.report)


@gpu
@needs_gpu
@pytest.mark.parametrize(
    "family, kv", [("qwen4_exp", "int8"), ("qwen4_exp", "q4"), ("gpt_oss", "q4")]
)
def test_codes_are_those_of_the_cpu_and_windows_change_no_bit(family: str, kv: str) -> None:
    """A last bit of a key can turn a code, and one code a later choice of expert: the typical
    position is compared closely, and the first ones, before anything can turn."""
    path, tokens = FIXTURES / family / "bf16.gguf", tokens_of(family, 40)
    engine = on_device(path, "cuda", expert_cache=0, kv=kv)
    whole = engine.logits(tokens, through="windows", window=4)
    single = engine.logits(tokens, through="windows", window=1)
    prompt = engine.logits(tokens, through="prompt")
    engine.close()
    assert np.array_equal(whole, single) and np.array_equal(whole, prompt)
    theirs = on_cpu(family, tokens, kv)
    apart = np.abs(whole - theirs).max(axis=1) / np.abs(theirs).max()
    assert np.median(apart) < 1e-3 and apart[:4].max() < 1e-3, apart


@gpu
@needs_gpu
@pytest.mark.parametrize("kv", ["int8", "q4"])
def test_rejected_tokens_and_tensor_core_prompts(kv: str) -> None:
    """Any rejected windows give the bits of a straight run; prompts in ``fast`` lie within the 11
    bits of f16 operands and a code's step of it, and windows go on from there."""
    path, tokens = FIXTURES / "qwen4_exp" / "bf16.gguf", tokens_of("qwen4_exp", 40)
    engine = on_device(path, "cuda", expert_cache=3, short_read=0, numerics="fast", kv=kv)
    straight = engine.logits(tokens, through="windows", window=1)
    rejected = windows_with_rejections(Model(engine), tokens, 4)
    fast = engine.logits(tokens, through="prompt")
    engine.close()
    assert np.array_equal(rejected, straight)
    apart = np.abs(fast - straight).max(axis=1)
    room = 0.02 if kv == "int8" else 0.1
    assert np.median(apart) < room * np.abs(straight).max()
