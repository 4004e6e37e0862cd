"""Safety of deferral and repair in a device's windows, and thresholds that are measured there.

Expectations: the order that deferral promises (``window/defer.py``, ``window/repair.py``), edited
so that it is wrong; the same engine without delays; the threshold's definition on stored times.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.engine.test_device_engine import (
    FIXTURES,
    INTERPRETED,
    gpu,
    needs_gpu,
    on_device,
    tokens_of,
)

from strata.core.errors import ProgramError
from strata.core.types import Place
from strata.engine.calibrate import SAMPLED, fix_thresholds
from strata.engine.engine import Engine
from strata.engine.window_times import Sampling
from strata.experts.below_auto import choose_below
from strata.experts.workers import DelayedWorker
from strata.window import device_run
from strata.window.program import Program, check

PATH = FIXTURES / "qwen4_exp" / "bf16.gguf"


def moved(program: Program, step_id: str, behind: str) -> Program:
    """The program with one step behind another."""
    step = program.steps[program.index(step_id)]
    rest = [s for s in program.steps if s.id != step_id]
    at = next(i for i, s in enumerate(rest) if s.id == behind)
    return program.edited([*rest[: at + 1], step, *rest[at + 1 :]])


def dropped(program: Program, step_id: str) -> Program:
    """The program without a step."""
    return program.edited(s for s in program.steps if s.id != step_id)


FAULTS = {
    "no wait": lambda p: dropped(p, "wait_late:2"),
    "wait behind the join": lambda p: moved(p, "wait_late:2", "late_join:2"),
    "join behind the FFN read": lambda p: moved(p, "late_join:2", "ffn_read:3"),
    "join behind plan and ring": lambda p: moved(p, "late_join:2", "ring:3"),
    "wait behind the next ring": lambda p: moved(p, "wait_late:2", "ring:3"),
}


@pytest.mark.parametrize(
    "mode, below", [("1", 0.0), ("1", 0.3), ("1", -1.0), ("repair", 0.0), ("repair", 0.3)]
)
@pytest.mark.skipif(not INTERPRETED, reason="nothing is run here")
def test_wrong_orders_are_refused(mode: str, below: float) -> None:
    """Recorded, not run: the static check takes the program, and none of the faults."""
    given = {"expert_cache": 3, "defer_cpu": mode, "defer_cpu_below": below}
    engine = automatic("cpu", mode) if below < 0 else on_device(PATH, "cpu", **given)
    program = engine.runner.window(2).program
    engine.close()
    check(program)
    for name, fault in FAULTS.items():
        with pytest.raises(ProgramError):
            check(fault(program))
            pytest.fail(name)


def automatic(device: str, mode: str) -> Engine:
    """An engine whose threshold for windows of 2 is imposed instead of measured."""
    engine = on_device(PATH, device, expert_cache=3)
    engine.service.late_below.fix(2, 0.25)
    make: Any = engine.runner.variant_for
    engine.runner.variant = make(replace(engine.settings, defer_cpu=mode, defer_cpu_below=-1.0))
    return engine


@pytest.mark.skipif(not INTERPRETED, reason="nothing is run here")
def test_thresholds_follow_the_windows_size() -> None:
    """The plan's scalars: by size for layers that may be late, never elsewhere; off takes them
    back, and the PCIe share of such windows is not sought."""
    engine = automatic("cpu", "1")
    engine.service.late_below.fix(4, 0.1)
    runner, below = engine.runner, engine.service.rules.below
    late = runner.variant.transforms[0].layers
    for size, wanted in ((2, 0.25), (3, 0.25), (4, 0.1)):
        runner._set_rules(runner.variant, size)
        expected = [wanted if i in late else -1.0 for i in range(engine.spec.n_layers)]
        assert below.tolist() == pytest.approx(expected)
    assert runner.variant.share_rests and not runner.overlaps["exact"].share_rests
    runner._set_rules(runner.overlaps["exact"], 4)
    assert set(below.tolist()) == {-1.0}
    engine.close()


@pytest.mark.skipif(not INTERPRETED, reason="the graph's clock is tested below")
def test_times_of_a_devices_window_through_the_interpreter() -> None:
    """One window of one token: m, f and c of each layer, and each missed expert's share as the
    router's weights give it."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    engine = on_device(path, "cpu", expert_cache=3, pcie_frac=0.0)
    sampling = Sampling(engine.runner, replace(engine.settings, defer_cpu="1"), "t")
    engine.runner.variant = sampling.variant
    engine.run_window([5])
    sampling.ran(1)
    times = sampling.taken(1)
    assert [t.layer for t in times.layers] == list(range(engine.spec.n_layers - 1))
    for t in times.layers:
        assert t.mixer_us > 0 and t.fast_us > 0 and t.cpu_us > 0
        plan = engine.service.of(t.layer)
        weight = engine.service.buffers(1).weight_LR[t.layer].double().numpy()
        row = np.concatenate([g.row for p, g in plan.groups.items() if p is Place.CPU])
        assert sorted(t.missed[0]) == pytest.approx(sorted(weight[row] / weight.sum()), abs=1e-5)
    engine.close()


def slowed(engine: Engine, delays: dict[int, float]) -> None:
    """Rows come late, by layer, from the Python workers."""
    engine.service.answer_in_python()
    for place, worker in list(engine.service.workers.items()):
        engine.service.workers[place] = DelayedWorker(worker, delays)


@gpu
@needs_gpu
@pytest.mark.parametrize("below", [0.0, 0.3])
def test_a_slow_host_changes_no_repaired_bit(below: float) -> None:
    """Delays of 0 to 50 ms in random layers; expectation: no delay."""
    tokens, found = tokens_of("qwen4_exp", 12), []
    for seed in range(3):
        engine = on_device(PATH, "cuda", expert_cache=3, pcie_frac=0.0, defer_cpu="repair",
                           defer_cpu_below=below)  # fmt: skip
        if seed:
            rng = np.random.default_rng(seed)
            slowed(engine, {i: float(rng.choice([0.0, 0.005, 0.05])) for i in range(8)})
        found.append(engine.logits(tokens, through="windows", window=3))
        engine.close()
    assert all(np.array_equal(found[0], other) for other in found)


@gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["1", "repair"])
def test_a_removed_wait_and_a_late_join_show(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows poisoned with NaN before each window and a host that takes 50 ms a layer: the right
    program gives the bits of an undelayed one; every other reads poison, or rows of the layer
    before, or joins too late, so its bits are others."""
    monkeypatch.setattr(device_run, "check", lambda program: None)
    found = {}
    for name, change in {"right": lambda p: p, "slow": lambda p: p, **FAULTS}.items():
        engine = on_device(PATH, "cuda", expert_cache=0, pcie_frac=0.0, defer_cpu=mode)
        runner = engine.runner
        last = (lambda program, frame, change=change: change(program),)
        runner.variant = replace(runner.variant, name=name, last=last)
        runner.window(1)
        if name != "right":
            slowed(engine, dict.fromkeys(range(8), 0.05))
        engine.service.handshake.out(True).fill_(float("nan"))
        found[name] = engine.run_window([9]).copy()
        engine.close()
    assert np.isfinite(found["right"]).all()
    assert np.array_equal(found["right"], found["slow"])
    for name in FAULTS:
        assert not np.array_equal(found["right"], found[name]), name


@gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["1", "check", "repair"])
def test_auto_measures_here_and_text_repeats(mode: str, tmp_path: Path) -> None:
    """Times by the device's own clock become a stored profile; the threshold is choose_below of
    it, and two engines that read it write the same, with a PCIe share left to the engine."""
    profile, tokens = tmp_path / "times.json", tokens_of("qwen4_exp", 24)
    texts = []
    for _ in range(2):
        engine = on_device(PATH, "cuda", expert_cache=3, defer_cpu=mode, defer_cpu_below=-1.0,
                           spec=2, defer_below_profile=profile)  # fmt: skip
        runner, late_below = engine.runner, engine.service.late_below
        assert late_below.sizes == [1, 2]
        assert any(line.startswith("defer-cpu-below auto") for line in engine.report)
        stored = json.loads(profile.read_text())
        for window in stored["windows"]:
            for layer in window["layers"]:
                assert min(layer["mixer_us"], layer["fast_us"], layer["cpu_us"]) > 0
                assert len(layer["missed"]) == SAMPLED
        late_below.fix(1, 0.2)
        late_below.fix(2, 0.2)
        texts.append(engine.logits(tokens, through="windows", window=2))
        assert engine.service.counters.total(Place.CPU_LATE) > 0
        assert runner.share is not None and runner.variant.share_rests
        engine.close()
    assert np.array_equal(texts[0], texts[1])


@gpu
@needs_gpu
def test_a_measured_threshold_is_the_definitions() -> None:
    """choose_below of what was measured just now."""
    engine = on_device(PATH, "cuda", expert_cache=3, pcie_frac=0.0)
    asked, taken = replace(engine.settings, defer_cpu="1", defer_cpu_below=-1.0), []

    def measure(n_tokens: int) -> Any:
        sampling = Sampling(engine.runner, asked, f"m {n_tokens}")
        engine.reset()
        engine.runner.variant = sampling.variant
        for _ in range(4):
            engine.run_window([9] * n_tokens)
            engine.commit(n_tokens)
            sampling.ran(n_tokens)
        taken.append(sampling.taken(n_tokens))
        return taken[-1]

    lines = fix_thresholds(engine.runner, asked, [1, 2], None, measure=measure)
    assert lines == [choose_below(times).line() for times in taken]
    assert [engine.service.late_below.of(n) for n in (1, 2)] == [
        choose_below(times).below for times in taken
    ]
    engine.close()
