"""Traces, step times and the adaptive cache on a GPU's windows. (Triton's interpreter takes a
minute for a window of these, so nothing here runs without a GPU.)

Expectations: the plan's experts are the trace's; every step that runs is stamped; logits are those
of the same engine without any of it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import strata
from strata.bench.arms import with_steps
from strata.bench.layers import time_layers
from strata.bench.routing import Locality, Replay, made_up_trace
from strata.engine.adaptive import adapting
from strata.window.stamps import EventClock, StepTimes
from tests.engine.test_device_engine import INTERPRETED, on_device

FIXTURES = Path(__file__).parent.parent / "fixtures"
PATH = FIXTURES / "qwen3_moe" / "bf16.gguf"
N_PAIRS = 24
"""(layer, expert) pairs of the model."""
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA GPU")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("cache", [5, N_PAIRS])
def test_windows_take_the_trace_and_are_stamped(cache: int) -> None:
    """Windows of 2 around the end of the trace; with some and with all experts resident."""
    engine = on_device(PATH, "cuda", expert_cache=cache)
    try:
        spec, runner = engine.spec, engine.runner
        ffn = spec.layers[0].ffn
        trace = made_up_trace(spec.n_layers, ffn.n_experts, ffn.n_active, 10, Locality())
        replay, times = Replay(spec, trace, runner.network.device), StepTimes(spec, EventClock)
        runner.variant = with_steps(runner.variant, "traced", replay, times)
        for start in (0, 4, 9):
            replay.seek(start)
            engine.run_window([3, 4])
            times.ended(2)
            rows = [start, (start + 1) % 10]
            for layer in range(spec.n_layers):
                used = set(engine.service.experts_of(layer).tolist())
                assert used == set(trace[layer, rows].reshape(-1).tolist())
        ran = [s for s in runner.window(2).program.steps if s.stream == "main"]
        assert set(times.seconds) == {(s.name, s.layer) for s in ran} and times.n_windows == 3
        assert all(s > 0 for (name, _), s in times.seconds.items() if name == "router")
    finally:
        engine.close()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["decayed", "lru"])
def test_the_cache_adapts_and_no_bit_changes(policy: str) -> None:
    """Six windows of two tokens, exchanged after each: the same bits, other residents."""
    logits, residents = [], []
    for given in ({}, {"adapt_swaps": 4, "adapt_every": 1, "adapt_policy": policy}):
        engine = on_device(PATH, "cuda", expert_cache=6, **given)
        adapting(engine, [layer.ffn.n_experts for layer in engine.spec.layers])
        try:
            for token in range(6):
                rows = engine.run_window([7, 8 + token]).copy()
                engine.commit(2)
            logits.append(rows)
            residents.append(engine.service.tier.resident())
        finally:
            engine.close()
    assert np.array_equal(logits[0], logits[1]) and residents[0] != residents[1]
    assert len(residents[1]) == 6


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("cache", [0, 5])
def test_a_recorded_window_tells_its_times(cache: int) -> None:
    """Stamps are nodes of the graph: layer times of replays add up to about the windows' own, the
    pool has times of its own, and the logits stay."""
    engine = on_device(PATH, "cuda", expert_cache=cache)
    try:
        variant = engine.runner.variant
        plain = engine.run_window([7]).copy()

        def run(timed: object) -> None:
            engine.runner.variant = timed
            for _ in range(5):
                assert np.array_equal(engine.run_window([7]), plain)

        found = time_layers(engine, variant, run)
        assert all(t.mixer_ms > 0 and t.fast_ms > 0 and t.cpu_ms > 0 for t in found.layers)
        assert 0.01 < found.total_ms < 100
        assert dataclasses.replace(variant) == variant
    finally:
        engine.close()


@needs_gpu
@pytest.mark.gpu
def test_an_answers_report_tells_step_times_and_decode_timing() -> None:
    """The settings as a user gives them: 4 windows of one token (the last is read too)."""
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    given = {"verify_profile": True, "decode_timing": True, "verify_trace": True}
    with strata.load(path, device="cuda", context=64, expert_cache=3, **given) as model:
        answer = model.generate([3, 4, 5], max_tokens=4)
        list(answer)
        lines = answer.report.lines()
        assert any("GDN layers: " in x and "over 4 windows" in x for x in lines)
        assert any(x.startswith("decode timing: 4 windows") for x in lines)
        assert any(x.startswith("verify-trace") and "off here" in x for x in model.report)
