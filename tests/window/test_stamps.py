"""Step times: every step is stamped once, intervals add up to the window, and nothing is computed
otherwise. Expectations: a clock that counts its own stamps, and the engine's own logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.window.run import PLAIN
from strata.window.stamps import BEHIND, FAST_SIDE, StepTimes, coarse, layer_kind

FIXTURES = Path(__file__).parent.parent / "fixtures"


class CountingClock:
    """Each stamp is a second after the one before."""

    recorded = False

    def __init__(self, n: int) -> None:
        self._n = n
        self.order: list[int] = []

    def stamp(self, i: int) -> None:
        self.order.append(i)

    def seconds(self) -> np.ndarray:
        assert self.order == list(range(self._n)), "stamps in order, each once"
        self.order = []
        return np.arange(self._n, dtype=np.float64)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "glm4_moe"])
def test_every_step_is_stamped_and_logits_stay(family: str) -> None:
    with strata.load(FIXTURES / family / "bf16.gguf", device="cpu", context=64) as model:
        engine = model.engine
        plain = engine.logits([3, 4, 5, 6], through="windows", window=2)
        times = StepTimes(engine.spec, CountingClock)
        engine.runner.variant = dataclasses.replace(PLAIN, name="t", transforms=(times,))
        assert np.array_equal(engine.logits([3, 4, 5, 6], through="windows", window=2), plain)
        times.fold()
        own = [s for s in engine.runner.window(2).program.steps if s.stream == "main"]
        assert times.n_windows == 2
        assert times.seconds == {(s.name, s.layer): 2.0 for s in own}
        layers = sum(times.layer_ms(layer) for layer in range(engine.spec.n_layers))
        assert layers + times.outside_ms() == pytest.approx(1e3 * len(own))
        first = next(i for i, x in enumerate(own) if x.name == "ffn_read")
        assert times.mixer_ms(0) == 1e3 * sum(s.name != "embed" for s in own[:first])
        assert times.line().endswith(f"total {1e3 * len(own):.3f} ms/window over 2 windows")
        times.clear()
        assert times.line() == "verify profile: no window has run"


def test_parts_are_stamped_where_they_meet() -> None:
    """One interval a run of steps of one part, so fewer stamps; the window is still all of it."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu", context=64) as model:
        engine = model.engine
        times = StepTimes(engine.spec, CountingClock, part_of=coarse)
        engine.runner.variant = dataclasses.replace(PLAIN, name="t", transforms=(times,))
        engine.logits([3, 4], through="windows", window=1)
        times.fold()
        own = [s for s in engine.runner.window(1).program.steps if s.stream == "main"]
        keys = [(coarse(s.name), s.layer) for s in own]
        runs = [key for i, key in enumerate(keys) if keys[i + 1 : i + 2] != [key]]
        assert times.n_windows == 2 and len(runs) < len(own) / 2
        assert sum(times.seconds.values()) == 2.0 * len(runs)
        # mixer, read to plan, ring, the fast side, the wait, what stands behind it
        assert [name for name, layer in runs if layer == 1] == [
            "attn_read", "router", "ring", "gpu_rows", "wait_cpu", "combine",
        ]  # fmt: skip
        assert times.mixer_ms(1) == times.layer_ms(1, FAST_SIDE) == 1e3
        assert times.layer_ms(1, BEHIND) == 1e3


def test_layers_of_each_mixer_stand_apart() -> None:
    """GDN and QSA layers of qwen4_exp, by the setting as a user gives it. Of 4 tokens the first is
    the prompt's; the last is read too, so that the state holds it."""
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    with strata.load(path, device="cpu", context=64, verify_profile=True) as model:
        answer = model.generate([3, 4, 5], max_tokens=4)
        list(answer)
        line = next(x for x in answer.report.lines() if "ms/window over 4 windows" in x)
        assert "GDN layers: " in line and " | QSA layers: " in line
        assert not any("ms/window" in x for x in answer.report.lines()), "told once"
        kinds = {layer_kind(model.engine.spec, i) for i in range(model.engine.spec.n_layers)}
        assert "QSA, experts" in kinds and "GDN, experts" in kinds


def test_a_missing_stamp_adds_nothing() -> None:
    """Backward stamps too: intervals are never negative."""

    class Broken(CountingClock):
        def seconds(self) -> np.ndarray:
            return -np.arange(self._n, dtype=np.float64)

    with strata.load(FIXTURES / "qwen3_moe" / "bf16.gguf", device="cpu", context=64) as model:
        times = StepTimes(model.engine.spec, Broken)
        model.engine.runner.variant = dataclasses.replace(PLAIN, name="t", transforms=(times,))
        model.engine.run_window([3])
        times.fold()
        assert times.n_windows == 1 and set(times.seconds.values()) == {0.0}
