"""Deferral: the seed's semantics against transformers with hooks, its safety under slow workers,
and off being off.

Expectations: logits with late experts come from tests/oracle (transformers, the late experts added
one mixer later, or
back in their own layer for "check"); the rest compares the engine with itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.oracle import FAMILIES, Options, cached

import strata
from strata.core.errors import SettingError
from strata.core.settings_load import load_settings
from strata.core.types import Place
from strata.engine.build import prepare
from strata.engine.model import Model
from strata.experts.workers import DelayedWorker
from strata.window.record import poisoned
from strata.window.run import WindowRunner

MOE = [f for f in FAMILIES if f not in ("llama", "qwen2", "qwen2_moe")]
FIXTURES = Path(__file__).parent.parent / "fixtures"


def profile(tmp_path: Path, model: Model, late_mask: np.ndarray) -> tuple[Path, int]:
    """A profile that makes exactly the experts outside the mask resident."""
    n_L = [len(a) for a in model.engine.service.tier.address_LE]
    pairs = [(i, e) for i, n in enumerate(n_L) for e in range(n) if not late_mask[e]]
    path = tmp_path / "profile.txt"
    path.write_text("".join(f"{layer} {expert}\n" for layer, expert in pairs))
    return path, len(pairs)


@pytest.mark.parametrize("family", MOE)
def test_deferred_logits_equal_transformers_with_late_experts(family: str, tmp_path: Path) -> None:
    """Half the experts late, mode 1 and check, float64 through windows of 1; check equals off to
    1e-11."""
    folder, ref = cached(family, Options(n_tokens=40, deferral=True))
    tokens, n = ref.input_ids.tolist(), ref.comparable()
    layers = ref.more["late_layers"].tolist()
    with strata.load(folder, device="cpu", dtype="float64") as model:
        plain = model.logits(tokens, through="windows")
        path, pairs = profile(tmp_path, model, ref.more["late_experts"])
    wanted = {"1": ref.more["logits_late"], "check": ref.more["logits_late_check"]}
    for mode, expected in wanted.items():
        with strata.load(
            folder, device="cpu", dtype="float64", expert_profile=path, expert_cache=pairs,
            adapt_swaps=0, defer_cpu=mode, defer_layers=layers, poison=True,
        ) as model:  # fmt: skip
            ours = model.logits(tokens, through="windows")
        assert np.abs(ours[:n] - expected[:n]).max() <= 1e-3 * np.abs(expected).max()
        if mode == "check":
            assert np.abs(ours - plain).max() <= 1e-6 * np.abs(plain).max()
        else:
            assert np.abs(ours - plain).max() > 1e-2 * np.abs(plain).max(), "nothing was late"


def slow(runner: WindowRunner, delays: dict[int, float]) -> None:
    """Host places answer late, each layer by its own delay."""
    workers = runner.service.workers
    for place in (Place.CPU, Place.CPU_LATE):
        workers[place] = DelayedWorker(workers[place], delays)


@pytest.mark.parametrize(
    "defer",
    [
        {},
        {"defer_cpu": "1"},
        {"defer_cpu": "1", "defer_cpu_below": 0.3},
        {"defer_cpu": "repair"},
        {"defer_cpu": "repair", "defer_cpu_below": 0.3},
    ],
)
def test_slow_workers_change_no_bit(defer: dict[str, object]) -> None:
    """Delays of 0, 5 and 50 ms in random layers (C20)."""
    rng = np.random.default_rng(1)
    tokens = [int(t) for t in rng.integers(8, 300, 10)]
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    with strata.load(path, device="cpu", poison=True, expert_cache=20, **defer) as model:
        expected = model.logits(tokens, through="windows", window=2)
        for _ in range(2):
            slow(model.engine.runner, {i: float(rng.choice([0, 0.005, 0.05])) for i in range(8)})
            assert np.array_equal(model.logits(tokens, through="windows", window=2), expected)


@pytest.mark.parametrize("mode", ["0", "1", "repair"])
def test_a_removed_wait_is_caught_by_a_slow_worker(mode: str) -> None:
    """The build with one wait taken out reads rows that are not there: NaN from the poison, never
    the right answer."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu", poison=True, defer_cpu=mode) as model:
        runner = model.engine.runner
        recorded = runner.window(1)
        name = "wait_cpu" if mode == "0" else "wait_late"
        at = recorded.program.index(f"{name}:1")
        steps = list(recorded.program.steps)
        steps[at] = replace(steps[at], launch=lambda: None)
        broken = replace(
            recorded, run=poisoned(recorded.program.edited(steps), recorded.frame.tensors())
        )
        slow(runner, {1: 0.2})
        logits = runner.run(broken, [9])
        runner.service.drain()
        assert not np.isfinite(logits.numpy()).all()


def test_off_is_off() -> None:
    """Without the setting: no buffer, no step, the same bits; with it, both exist."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with (
        strata.load(path, device="cpu") as off,
        strata.load(path, device="cpu", defer_cpu="1") as on,
    ):
        plain, late = off.engine.runner.window(2), on.engine.runner.window(2)
        assert "cpu_rows_late" not in plain.frame.tensors()
        assert "cpu_rows_late" in late.frame.tensors()
        assert not any(s.name in ("late_join", "wait_late") for s in plain.program.steps)
        assert (
            sum(s.name == "late_join" for s in late.program.steps) == off.engine.spec.n_layers - 1
        )
        tokens = list(range(10, 40))
        assert np.array_equal(off.logits(tokens), on.logits(tokens)), "prompts are never deferred"


def test_row_split_keeps_heavy_rows_on_time() -> None:
    """Rows of at least W of their token's weight are on time, with all rows of their expert."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu", defer_cpu="1", defer_cpu_below=0.25) as model:
        engine = model.engine
        engine.run_window([9, 10, 11, 12])
        runner = engine.runner
        weight = runner.window(4).frame["weight"].numpy().reshape(4, -1)
        share = (weight / weight.sum(1, keepdims=True)).reshape(-1)
        expert = runner.window(4).frame["expert"].numpy()
        last = engine.spec.n_layers - 1
        plan = runner.service.of(last)  # never late
        assert plan.count(Place.CPU_LATE) == 0 and plan.count(Place.CPU) == len(expert)
        total = {p: sum(runner.service.of(i).count(p) for i in range(last)) for p in Place}
        assert total[Place.CPU_LATE] and total[Place.CPU]
        assert share.shape == (len(expert),)
        engine.commit(0)


def test_check_mode_and_splits_are_close_to_exact_in_order() -> None:
    """More rows on time, less change: check < split < all, by the largest difference to off."""
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    tokens = list(range(20, 44))
    with strata.load(path, device="cpu") as model:
        exact = model.logits(tokens, through="windows")
    errors = []
    for settings in (
        {"defer_cpu": "check"},
        {"defer_cpu": "1", "defer_cpu_below": 0.2},
        {"defer_cpu": "1"},
    ):
        with strata.load(path, device="cpu", **settings) as model:
            errors.append(float(np.abs(model.logits(tokens, through="windows") - exact).mean()))
    assert errors[0] < 1e-4 < errors[1] < errors[2]


def test_what_cannot_be_is_refused() -> None:
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    with pytest.raises(SettingError, match="needs --defer-cpu"):
        strata.load(path, device="cpu", defer_cpu_below=0.1)
    with strata.load(path, device="cpu") as model:
        last = model.engine.spec.n_layers - 1
    with pytest.raises(SettingError, match=r"--defer-layers 0,\d+: these cannot be late"):
        strata.load(path, device="cpu", defer_cpu="1", defer_layers=[0, 1, last])
    with pytest.raises(SettingError, match="must be one of 0, 1, check, repair"):
        strata.load(path, device="cpu", defer_cpu="2")


def test_impossible_layers_and_biases_are_refused_before_anything_is_loaded() -> None:
    """``prepare`` reads the header and plans; no tensor and no expert is loaded by it."""
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    for given, message in (
        ({"defer_cpu": "1", "defer_layers": [4]}, "--defer-layers 4: these cannot be late"),
        ({"logit_bias": {9999: 1.0}}, "token 9999 is outside the vocabulary of 320"),
    ):
        with pytest.raises(SettingError, match=message):
            prepare(path, load_settings({"device": "cpu", **given}))


def test_the_log_says_which_layers_and_windows_are_deferred(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """C45: so many of so many layers, and why not the others; one line when a window is made, also
    where all experts of the layers are cached, but not all of the model."""
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    caplog.set_level("INFO", logger="strata")
    with strata.load(path, device="cpu", defer_cpu="1") as model:
        line = next(x for x in model.report if "STRATA_VERIFY_DEFER_CPU=1" in x)
        assert "(changes the output): rows of 3 of 5 expert layers may be late" in line
        assert (
            "never layer 0 (1 begins with an n-gram block), 4 (the head reads its result)" in line
        )
        runner = model.engine.runner
        for _ in range(2):
            runner.window(3)
    said = [r.getMessage() for r in caplog.records if "capturing" in r.getMessage()]
    assert said == ["strata verify: capturing the 3-token window, deferred"]
    caplog.clear()
    ranked = tmp_path / "ranked.txt"
    ranked.write_text("".join(f"{layer} {e}\n" for layer in (1, 2, 3, 4) for e in range(8)))
    with strata.load(
        path, device="cpu", defer_cpu="repair", expert_profile=ranked, expert_cache=32
    ) as model:
        model.engine.runner.window(1)
    assert "1-token window, not deferred: no expert of its layers is missed" in caplog.text
