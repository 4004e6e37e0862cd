"""Prompts on a device with a share of the experts on the CPU, whole engines.

Expectations: in exact numerics the bits of windows for any share (docs/decisions/001), and through
the interpreter the CPU engine's logits; in fast numerics those within f16 operands' precision.
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
    on_cpu,
    on_device,
    tokens_of,
)

from strata.core.types import Place
from strata.experts.workers import DelayedWorker
from strata.window import device_chunk

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


# hidden rows of the CPU's experts are whatever lay in memory, and nobody reads what becomes of them
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@interpreted
def test_fast_prompts_with_shares_of_the_cpu() -> None:
    tokens = tokens_of("qwen3_moe", 2)
    engine = on_device(
        FIXTURES / "qwen3_moe" / "bf16.gguf", "cpu", expert_cache=3, short_read=0, numerics="fast"
    )
    experts, found, rows = engine.runner._reader.experts, [], []
    for share in (0.0, 0.5, 1.0):
        experts.policy.fixed = share
        engine.reset()
        found.append(engine.logits(tokens, through="prompt"))
        rows.append(sum(experts.host.times.rows))
    engine.close()
    assert 0 == rows[0] < rows[1] < rows[2]
    theirs = on_cpu("qwen3_moe", "bf16", tokens)
    assert all(np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max() for ours in found)


@interpreted
def test_exact_prompts_with_a_share_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one token, so that the interpreter needs seconds, not a minute."""
    monkeypatch.setattr(device_chunk, "PIECE", 1)
    monkeypatch.setattr(device_chunk.ChunkReader, "piece", 1)
    tokens = tokens_of("qwen3_moe", 2)
    engine = on_device(FIXTURES / "qwen3_moe" / "bf16.gguf", "cpu", expert_cache=3, short_read=0)
    engine.runner._reader.experts.policy.fixed = 0.5
    ours = engine.logits(tokens, through="prompt")
    assert sum(engine.runner._reader.experts.host.times.rows) > 0
    engine.close()
    assert near(ours, on_cpu("qwen3_moe", "bf16", tokens))


@gpu
@needs_gpu
@pytest.mark.parametrize("family, stem", [("qwen4_exp", "q8_0"), ("gpt_oss", "mxfp4")])
def test_no_share_changes_a_bit(family: str, stem: str) -> None:
    """Twice each, as the second time launches go ahead of the CPU; at last with slow workers."""
    path, tokens = FIXTURES / family / f"{stem}.gguf", tokens_of(family, 45)
    same = {"expert_cache": 3, "context": 128}
    engine = on_device(path, "cuda", short_read=10**6, **same)
    want = engine.logits(tokens, through="prompt")
    engine.close()
    engine = on_device(path, "cuda", short_read=0, **same)
    experts = engine.runner._reader.experts
    for share in (0.5, 0.5, 1.0, 1.0, 0.0, 0.3):
        experts.policy.fixed = share
        engine.reset()
        assert np.array_equal(engine.logits(tokens, through="prompt"), want), share
    delays = {i: 0.02 * (i % 3) for i in range(8)}
    workers = experts.service.workers
    workers[Place.CPU] = DelayedWorker(workers[Place.CPU], delays)
    experts.policy.fixed = 0.5
    engine.reset()
    assert np.array_equal(engine.logits(tokens, through="prompt"), want)
    engine.close()
