"""--defer-cpu-below auto in an engine: measured at start and stored, or read back; with stored
times everything repeats. Expectations: the setting's help and choose_below on the stored times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import strata
from strata.core.errors import FormatError, InputError, SettingError
from strata.core.types import Place
from strata.engine.calibrate import SAMPLED
from strata.experts.below_auto import choose_below, from_json

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "bf16.gguf"
AUTO = {"device": "cpu", "workers": 1, "context": 64, "defer_cpu": "1", "defer_cpu_below": "auto"}


def test_measured_stored_and_read_back(tmp_path: Path) -> None:
    """One threshold for each window size up to --spec, printed; times of every deferrable layer;
    the second start reads them and prints the same thresholds."""
    path = tmp_path / "sub" / "times.json"
    with strata.load(FIXTURE, spec=2, defer_below_profile=path, **AUTO) as model:
        first = [line for line in model.report if line.startswith("defer-cpu-below auto")]
        layers = model.engine.runner.variant.transforms[0].layers
        assert model.engine.length == 0 and model.engine.service.late_below.sizes == [1, 2]
    stored = json.loads(path.read_text())
    assert [w["n_tokens"] for w in stored["windows"]] == [1, 2]
    for window in stored["windows"]:
        assert [layer["layer"] for layer in window["layers"]] == layers
        for layer in window["layers"]:
            assert layer["mixer_us"] > 0 and layer["cpu_us"] > 0 and layer["fast_us"] > 0
            assert len(layer["missed"]) == SAMPLED
            assert all(3 <= len(shares) <= 6 for shares in layer["missed"])
    lines = [choose_below(from_json(w)).line() for w in stored["windows"]]
    assert first == [*lines, f"defer-cpu-below auto: times stored in {path}"]
    with strata.load(FIXTURE, spec=2, defer_below_profile=path, **AUTO) as model:
        again = [line for line in model.report if line.startswith("defer-cpu-below auto")]
    assert again == [f"{line}, from {path}" for line in lines]


def imposed(path: Path, cpu_us: float) -> None:
    """The stored times with another CPU."""
    stored = json.loads(path.read_text())
    for window in stored["windows"]:
        for layer in window["layers"]:
            layer |= {"mixer_us": 50.0, "fast_us": 1.0, "cpu_us": cpu_us}
    path.write_text(json.dumps(stored))


def test_greedy_text_repeats_with_a_stored_profile(tmp_path: Path) -> None:
    """Twice the same 16 tokens; a slower CPU leaves fewer rows late."""
    path = tmp_path / "times.json"
    with strata.load(FIXTURE, defer_below_profile=path, **AUTO) as model:
        assert model.engine.service.counters.rows_LP == {}, "windows that measure do not count"
    late = {}
    for cpu_us in (20.0, 45.0):
        imposed(path, cpu_us)
        texts = []
        for _ in range(2):
            with strata.load(FIXTURE, defer_below_profile=path, **AUTO) as model:
                texts.append([e.token for e in model.generate([9, 10, 11], max_tokens=16)])
                late[cpu_us] = model.engine.service.counters.total(Place.CPU_LATE)
                on_time = model.engine.service.counters.total(Place.CPU)
        assert texts[0] == texts[1]
        assert late[cpu_us] > 0 and on_time > 0
    assert late[45.0] < late[20.0]


def test_what_is_refused(tmp_path: Path) -> None:
    """A profile of another residency or model, a damaged one, and auto without deferral."""
    path = tmp_path / "times.json"
    strata.load(FIXTURE, defer_below_profile=path, **AUTO).close()
    with pytest.raises(InputError, match=r"belongs to another resident \(0 experts.*here it is 4 "):
        strata.load(FIXTURE, defer_below_profile=path, expert_cache=4, **AUTO)
    other = FIXTURE.parent / "q8_0.gguf"
    with pytest.raises(InputError, match="belongs to another model"):
        strata.load(other, defer_below_profile=path, **AUTO)
    path.write_text("{}")
    with pytest.raises(FormatError, match="holds no times"):
        strata.load(FIXTURE, defer_below_profile=path, **AUTO)
    with pytest.raises(SettingError, match="--defer-cpu-below auto needs --defer-cpu"):
        strata.load(FIXTURE, device="cpu", defer_cpu_below="auto")
    with pytest.raises(SettingError, match="--defer-below-profile needs --defer-cpu-below auto"):
        strata.load(FIXTURE, device="cpu", defer_cpu="1", defer_below_profile=path)


def test_without_auto_nothing_is_measured() -> None:
    """No threshold, no line: off is off."""
    with strata.load(FIXTURE, device="cpu", defer_cpu="1", defer_cpu_below=0.2) as model:
        assert model.engine.service.late_below.sizes == []
        assert not any("auto: windows" in line for line in model.report)
