"""What deferral should gain, and made-up states.

Expectations: min(m, max(0, c - max(f, c_on))) by hand; the state's own shapes; conditions of the
tables as they were asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import strata
from strata.bench.arms import parse_arms
from strata.bench.gains import Gains
from strata.bench.made_up_state import fill_state
from strata.bench.protocol import Measured, Run
from strata.cli import main
from strata.core.errors import ContextLengthError
from strata.experts.below_auto import LayerTimes, WindowTimes

FIXTURES = Path(__file__).parent.parent / "fixtures"
PATH = FIXTURES / "qwen3_moe" / "bf16.gguf"
TIMES = WindowTimes(1, (
    LayerTimes(0, 50.0, 10.0, 20.0, ((0.5, 0.1, 0.1, 0.1),)),  # c 80, f 10: min(50, 70)
    LayerTimes(1, 50.0, 70.0, 20.0, ((0.3, 0.3, 0.1, 0.1),)),  # c 80, f 70: min(50, 10)
))  # fmt: skip


def result_of(ms: dict[str, float]) -> Measured:
    """Windows of an arm that all take as long."""
    runs = [
        Run(arm, 0, p, 5, tokens=10, seconds=10 * t / 1e3, windows=10)
        for arm, t in ms.items()
        for p in range(3)
    ]
    return Measured(runs=runs)


def test_predicted_beside_measured() -> None:
    """All late: 50 + 10 us. Below 0.2: 3 and 2 experts late, so c_on is 20 and 40: 50 + 10 us.
    Below 0.4: layer 0 as before, 4 late in layer 1. check gains nothing."""
    with strata.load(PATH, device="cpu", context=64) as model:
        arms = parse_arms(
            "off,floor,check,defer,light=defer-cpu:1+defer-cpu-below:0.2,"
            "one=defer-cpu:repair+defer-layers:1"
        )
        gains = Gains(model.engine, arms)
        assert gains.wanted and gains.of("defer") is None, "nothing was measured yet"
        gains._times, gains._behind = TIMES, {0: 12.0, 1: 4.0}
        found = {arm.name: gains.of(arm.name) for arm in arms}
        assert found["off"] is None and found["floor"] is None
        told = {name: (g.us, g.late_share) for name, g in found.items() if g is not None}
        assert told == {
            "check": (0.0, 1.0),
            "defer": (60.0, 1.0),
            "light": (60.0, 5 / 8),
            "one": (10.0, 1.0),
        }
        ms = {"off": 0.56, "floor": 0.56, "check": 0.56, "defer": 0.51, "light": 0.5, "one": 0.55}
        lines, facts = gains.lines(result_of(ms), "off")
    assert lines[0].startswith("noise floor, floor against off: +0.0 %")
    assert facts["defer"]["predicted_gain"] == pytest.approx(0.56 / 0.50 - 1)
    assert facts["defer"]["measured_of_predicted"] == pytest.approx((0.56 / 0.51 - 1) / 0.12)
    assert facts["light"]["measured_of_predicted"] == pytest.approx(1)
    assert "light against off: predicted +12.0 % (0.06 of 0.56 ms a window, 62 %" in lines[3]
    assert facts["check"]["measured_of_predicted"] is None and "1.00 of it" in lines[3]
    # with b: min(62, 70) + min(54, 10), split min(62, 60) + min(54, 10), check min(12, 70) +
    # min(4, 10)
    for name, us in (("defer", 72.0), ("light", 70.0), ("check", 16.0), ("one", 10.0)):
        assert facts[name]["predicted_with_combine"] == pytest.approx(0.56 / (0.56 - us / 1e3) - 1)


@pytest.mark.parametrize("family", ["qwen4_exp", "deepseek_v3"])
def test_a_made_up_state_runs_and_repeats(family: str) -> None:
    """Finite logits at its length; the same numbers give the same bits, others do not."""
    path = FIXTURES / family / "bf16.gguf"
    with strata.load(path, device="cpu", context=64) as model:
        engine, rows = model.engine, []
        for seed in (1, 1, 2):
            fill_state(engine.state, range(10, 50), seed)
            assert engine.length == 40 and engine.tokens == list(range(10, 50))
            rows.append(engine.run_window([5]).copy())
            engine.commit(1)
        assert np.isfinite(rows[0]).all()
        assert np.array_equal(rows[0], rows[1]) and not np.array_equal(rows[0], rows[2])
        for layer, name in engine.state.specs:
            assert torch.count_nonzero(engine.state.tensor(layer, name).float()) > 0
        with pytest.raises(ContextLengthError):
            fill_state(engine.state, range(65))


def test_tables_by_threads_and_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four tables of two arms, each with its conditions, its floor and its threshold."""
    path = tmp_path / "r.json"
    given = ["--device", "cpu", "--context", "64", "--json", str(path), "--no-layers"]
    asked = ["--threads", "2,1", "--at", "8,20", "--arms", "off,floor,below", "--window", "1"]
    small = ["--prompts", "1", "--tokens", "3", "--rounds", "1"]
    assert main(["bench", str(PATH), *given, *asked, *small]) == 0
    records = json.loads(path.read_text())
    assert len(records) == 12
    cells = list(dict.fromkeys((r["threads"], r["at"], r["workers"]) for r in records))
    assert cells == [(2, 8, 2), (2, 20, 2), (1, 8, 1), (1, 20, 1)]
    out = capsys.readouterr()
    text = out.out + out.err
    assert text.count("noise floor, floor against off") == 4
    assert text.count("defer-cpu-below auto: windows of 1") == 4
    assert all(len(r["in_turn"]) > 0 and r["runs"][0][2] == r["at"] for r in records)
