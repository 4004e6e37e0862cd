"""Several sizes of the fast tier on one engine, and predictions for them.

Expectations: logits with another size are those of a fresh engine (where a row is computed changes
no bit); shares and seconds by hand; a made-up clock.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strata
from strata.bench import placed
from strata.bench.machine import Bandwidths
from strata.bench.predict import Prediction, SliceTime, expected_hits
from strata.bench.routing import Locality
from strata.bench.sweep import Phases, Slots
from strata.core.errors import SettingError
from strata.core.settings_load import load_settings
from strata.core.types import Place
from strata.engine.build import prepare
from strata.experts.share_control import ShareControl
from strata.models.synthetic import cut_down

PATH = Path(__file__).parent.parent / "fixtures" / "qwen3_moe" / "bf16.gguf"
TOKENS = [3, 4, 5, 6]
SMALL = "synthetic:qwen3-30b-a3b:Q4_K_M:layers=4:experts=8:vocab=256"


def test_sizes_change_on_one_engine_and_no_bit_does() -> None:
    """From all to none to some: the residents of a fresh engine of that size, its rows by place,
    and its logits."""
    with strata.load(PATH, device="cpu", context=64, expert_cache=24) as model:
        engine = model.engine
        slots = Slots(engine)
        assert slots.n_pairs == 24
        for n in (24, 0, 5):
            slots.resize(n)
            before = engine.service.counters.total(Place.FAST)
            ours = engine.logits(TOKENS, through="windows", window=2)
            used = engine.service.counters.total(Place.FAST) - before
            with strata.load(PATH, device="cpu", context=64, expert_cache=n) as fresh:
                theirs = fresh.logits(TOKENS, through="windows", window=2)
                assert engine.service.tier.resident() == fresh.engine.service.tier.resident()
                assert used == fresh.engine.service.counters.total(Place.FAST)
            assert np.array_equal(ours, theirs) and engine.service.tier.n_slots == n
        with pytest.raises(SettingError, match="25 slots: the model"):
            slots.resize(25)


def test_an_adaptive_cache_has_one_size() -> None:
    with (
        strata.load(PATH, device="cpu", context=64, expert_cache=4, adapt_swaps=2) as model,
        pytest.raises(SettingError, match="adapt-swaps"),
    ):
        Slots(model.engine)


def test_a_share_that_was_found_is_sought_anew() -> None:
    """It rests after its trials; restarted it begins at what was found and does not rest."""
    applied: list[tuple[int, ...]] = []
    control = ShareControl(64, 10, applied.append)
    for _ in range(400):
        control.before(1)
        control.after(1, 0.01 + 0.0005 * applied[-1][9], lambda: np.full(4, 10))
        if control.resting(1):
            break
    found = control.share(1)
    assert control.resting(1) and found < 64
    control.restart()
    control.before(1)
    assert control.share(1) == found and not control.resting(1)


def test_phases_of_loading_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start 1 s, a phase of 2 s, then 4 s without one."""
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("strata.bench.sweep.time.perf_counter", lambda: next(now))
    phases = Phases()
    for done in (0, 5, 10):
        phases("experts", done, 10)
    phases.end()
    assert phases.seconds == {"start": 1.0, "experts": 2.0, "after experts": 4.0}
    assert phases.line().startswith("loaded in 7.0 s")


def test_a_cut_down_model_says_so() -> None:
    assert cut_down(SMALL) == "4 of 48 layers, 8 of 128 experts, 256 of 151936 words"
    assert cut_down("synthetic:qwen3-30b-a3b:Q4_K_M") == "" == cut_down(PATH)


def test_hits_are_not_judged_by_the_text_that_chose_them(tmp_path: Path) -> None:
    """Evenly filled: the slots' share. Profiled on a text without preferences: no more than that
    either, where the same text would promise half as much again."""
    profile = tmp_path / "p.txt"
    profile.write_text("0 0\n")
    path = SMALL.replace("experts=8", "experts=128")
    for given in ({}, {"expert_profile": str(profile)}):
        ready = prepare(path, load_settings({"device": "cpu", "context": 64, **given}))
        assert expected_hits(ready, Locality(0, 0), 4 * 32) == pytest.approx(0.25, abs=0.02)
        assert expected_hits(ready, Locality(0, 0), 4 * 128) == 1.0
    assert expected_hits(ready, Locality(1.5, 0), 4 * 32) > 0.6
    ready.plan.checkpoint.close()


def test_a_prediction_from_placed_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 2 + 3 ms a layer, and 1 ms more a layer for experts outside: slices of 1 and 2 (or
    however many) layers give the law's line exactly, as the layers' experts are of two sizes in
    turns. On the CPU's engine, whose clock is replaced."""
    made: list[placed.Windows] = []

    def take(windows: placed.Windows) -> float:
        engine = windows._engine
        held = len(engine.service.tier.resident()) / windows._slots.n_pairs
        made.append(windows)
        return 2e-3 + 1e-3 * engine.spec.n_layers * (3 + (1 - held))

    monkeypatch.setattr(placed.Windows, "take", take)
    monkeypatch.setattr(placed, "TURNS", 1)
    monkeypatch.setattr(placed, "MOST_SETTLING", 8)
    monkeypatch.setattr(placed, "load_slice", _all_resident(placed.load_slice))
    monkeypatch.setattr("strata.engine.layout_cost._READ_BYTES", 8 << 20)
    asked = load_settings({"device": "cpu", "context": 64})
    ready = prepare(SMALL, asked)
    wanted = placed.Asked([32, 16, 0], Locality(0, 0), at=4)
    found = placed._on_slices(ready, asked, wanted, Bandwidths(1e9, 1e9, 1e9, 1e9))
    ready.plan.checkpoint.close()
    assert [p.hit_rate for p in found] == [1.0, 0.5, 0.0]
    sizes = [entry[0].blob_bytes for entry in ready.plan.shapes if entry is not None]
    large = found[0].slices[1].n_layers
    scale = sum(sizes) / sum(sizes[:large])
    extra = [0.0, 0.5e-3 * large * scale, 1e-3 * large * scale]
    for prediction, more in zip(found, extra, strict=True):
        assert prediction.fixed_s == pytest.approx(14e-3)
        assert prediction.window_s == pytest.approx(14e-3 + more)
    assert "CPU and link make" in found[2].lines()[1]


def _all_resident(load: object) -> object:
    """On the CPU slices are loaded with no fast tier; the prediction is of a GPU's."""

    def loaded(*given: object) -> object:
        engine, traffic = load(*given)  # type: ignore[operator]
        slots = Slots(engine)
        slots.resize(slots.n_pairs)
        return engine, traffic

    return loaded


def test_a_prediction_beside_what_was_measured() -> None:
    slices = (SliceTime(1, 0.01, 0.0, 0.0), SliceTime(2, 0.02, 0.0, 0.0))
    made = Prediction(0.03, 1e6, 0.0, 1e9, Bandwidths(1e9), 0.5, slices, placed_s=0.01)
    assert made.window_s == pytest.approx(0.04)
    assert "is -20.0% of that time off" in made.beside(SliceTime(4, 0.05, 0.0, 0.0)).lines()[-1]
