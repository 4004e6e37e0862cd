"""What is left behind after trouble: eviction without end (C17), NaN in one request (C18b).

Expectations: the engine itself with all experts in RAM and no cache, and the same request on a
healthy engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.oracle import Options, cached

import strata
from strata.core.errors import NumericsError

FIXTURES = Path(__file__).parent.parent / "fixtures"


def evicted(n_prompt: int, n_new: int) -> None:
    """64 experts, room for 6, a swap after every window: the same bits as without a cache."""
    folder, _ = cached("qwen3_moe", Options(config={"num_experts": 64}, n_tokens=40))
    rng = np.random.default_rng(5)
    prompt = [int(t) for t in rng.integers(8, 300, n_prompt)]
    room = {"device": "cpu", "context": n_prompt + n_new + 8}
    with (
        strata.load(folder, **room) as plain,
        strata.load(folder, expert_cache=6, **room) as small,
    ):
        tier = small.engine.service.tier
        everyone = [(i, e) for i, a in enumerate(tier.address_LE) for e in range(len(a))]
        a, b = plain.engine.read_prompt(prompt), small.engine.read_prompt(prompt)
        for _ in range(n_new):
            assert np.array_equal(a, b)
            token = int(a.argmax())
            a, b = plain.engine.run_window([token])[0], small.engine.run_window([token])[0]
            plain.engine.commit(1)
            small.engine.commit(1)
            resident = tier.resident()
            into = everyone[int(rng.integers(len(everyone)))]
            if into not in resident:
                tier.evict(resident[int(rng.integers(len(resident)))])
                tier.insert(into)


def test_c17_slots_under_constant_eviction() -> None:
    evicted(n_prompt=300, n_new=60)


@pytest.mark.soak
def test_c17_slots_under_constant_eviction_at_full_length() -> None:
    evicted(n_prompt=2000, n_new=500)


@pytest.mark.parametrize("family", ["qwen4_exp", "deepseek_v3"])
def test_c18b_nan_ends_one_request_and_leaves_nothing_behind(family: str) -> None:
    """NaN written into the hidden state in mid-window: an error, never token 0; the next answer is
    right."""
    prompt = list(range(20, 40))
    with strata.load(FIXTURES / family / "bf16.gguf", device="cpu", context=64) as model:
        healthy = [e.token for e in model.generate(prompt, max_tokens=6)]
        runner = model.engine.runner
        recorded = runner.window(1)
        at = recorded.program.index("ffn_read:1")
        steps = list(recorded.program.steps)
        inner = steps[at].launch

        def spoil() -> None:
            recorded.frame["residual"].fill_(float("nan"))
            inner()

        steps[at] = replace(steps[at], launch=spoil)

        def bad() -> None:
            for step in steps:
                if step.stream != "host":
                    step.launch()

        key = next(k for k, v in runner._windows.items() if v is recorded)
        runner._windows[key] = replace(recorded, run=bad)
        with pytest.raises(NumericsError, match="position 21"):
            list(model.generate([*prompt[:-1], 41], max_tokens=6))
        runner._windows[key] = recorded
        assert [e.token for e in model.generate(prompt, max_tokens=6)] == healthy
