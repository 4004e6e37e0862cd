"""strata tune and --quality-budget, with speeds given by hand and changes measured: the choice, the
profile, and what is refused. Expectations: the definitions in the settings' help."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import strata
from strata import cli
from strata.core.errors import FormatError, InputError, SettingError
from strata.core.settings import Settings
from strata.core.settings_load import user_data_dir
from strata.engine import fingerprints, tuned
from strata.engine.engine import Engine
from strata.engine.tuned import Point, TunedProfile, load_profile
from strata.quality import tune
from strata.quality.texts import Text
from strata.quality.tune import Tuner, choice, decode_speed, pareto, tune_lines

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "bf16.gguf"
TEXT = Text("a", tuple(np.random.default_rng(1).integers(8, 300, 12).tolist()))
LOADED = {"device": "cpu", "workers": 1, "context": 64}


def scripted(engine: Engine, settings: Settings, text: Text) -> float:
    """More late rows are faster, repair costs a little, windows help; skipping is slow."""
    if settings.route_tail_skip:
        return 1.0
    gain = {"0": 0.0, "1": 10.0, "repair": 9.0}[settings.defer_cpu]
    part = 0.5 + 0.1 * settings.defer_cpu_below if settings.defer_cpu_below else 1.0
    return 20.0 + gain * part + settings.spec


def tuned_points(budget: float) -> tuple[list[Point], Tuner]:
    with strata.load(FIXTURE, **LOADED) as model:
        tuner = Tuner([TEXT], budget, (1, 2), speed=scripted, rounds=1)
        return tuner.run(model), tuner


def test_the_fastest_within_the_budget_is_chosen() -> None:
    """Every candidate faster than exact is compared; the choice follows the budget from exact to
    the fastest; the table marks what nothing beats."""
    points, tuner = tuned_points(10.0)
    names = [p.name for p in points]
    assert "exact" in names and "spec=2" in names and "defer_cpu=1,spec=2" in names
    assert [p.tokens_s for p in points] == sorted((p.tokens_s for p in points), reverse=True)
    lossy = [p for p in points if "defer_cpu" in p.settings]
    assert len(lossy) >= 6 and all(p.kl > 0 and p.worst_kl >= p.kl and p.top1 < 1 for p in lossy)
    assert all(p.kl == 0 and p.within(0) for p in points if p not in lossy)
    assert any("skip" in name and "not faster" in why for name, why in tuner.skipped.items())
    assert choice(points, 10.0).name == "defer_cpu=1,spec=2"
    assert choice(points, 0.0).name == "spec=2"
    some = sorted(lossy, key=lambda p: p.worst_kl)[0]
    budget = max(some.kl, some.worst_kl / 2)
    best = choice(points, budget)
    assert best.within(budget) and best.tokens_s >= some.tokens_s
    text = "\n".join(tune_lines(points, budget, tuner.skipped))
    assert f"{best.name}, {best.tokens_s:.2f} tokens/s" in text and "not compared: skip" in text
    for p in points:
        beaten = [q for q in points if q.tokens_s > p.tokens_s and q.kl <= p.kl]
        assert not (beaten and pareto(p, points))


def test_budget_of_nothing_compares_nothing() -> None:
    points, tuner = tuned_points(0.0)
    assert {p.name for p in points} == {"exact", "spec=2"}
    assert any("budget of 0" in why for why in tuner.skipped.values())


def test_worst_bucket_counts_twice() -> None:
    """The mean within the budget, no bucket over twice it."""
    assert Point({}, 1, 0, kl=0.02, worst_kl=0.04, top1=1).within(0.02)
    assert not Point({}, 1, 0, kl=0.021, worst_kl=0.021, top1=1).within(0.02)
    assert not Point({}, 1, 0, kl=0.01, worst_kl=0.041, top1=1).within(0.02)


def test_decode_speed_counts_what_was_decoded() -> None:
    """A positive speed of exact and deferred windows; the sequence is gone afterwards."""
    with strata.load(FIXTURE, spec=2, defer_cpu="repair", **LOADED) as model:
        assert decode_speed(model.engine, model.settings, TEXT) > 0
        assert model.engine.length == 0


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the command stores of the fixture model on this machine."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "a.txt").write_text("one two three, four.", encoding="utf-8")
    call = ["tune", str(FIXTURE), "--text", str(folder / "a.txt"), "--kl-budget", "10", "--quiet"]
    flags = ["--device", "cpu", "--workers", "1", "--context", "64", "--windows", "1,2"]
    more = ["--tokens", "12", "--profile-dir", str(folder / "p"), "--json", str(folder / "j.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "decode_speed", scripted)
        assert cli.main([*call, *flags, *more]) == 0
    (path,) = (folder / "p").iterdir()
    points = json.loads((folder / "j.json").read_text())
    assert json.loads(path.read_text())["points"] == points
    return path.read_bytes()


@pytest.fixture
def profile(stored: bytes, tmp_path: Path) -> Path:
    """The profile where this machine and model look for it."""
    model = fingerprints.model_digest(FIXTURE)
    path = tmp_path / f"{model[:16]}-{fingerprints.machine_facts().digest}.json"
    path.write_bytes(stored)
    return path


def test_a_profile_is_used_and_refused(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--quality-budget takes the fastest point within it, of the window size asked for; it is
    refused together with what it decides, for other conditions, models and machines."""
    budget = {**LOADED, "quality_budget": 10.0, "profile_dir": profile.parent}
    with strata.load(FIXTURE, **budget) as model:
        assert (model.settings.defer_cpu, model.settings.spec) == ("1", 2)
        report = "\n".join(model.report)
    assert "defer-cpu = 1 (--quality-budget 10): on (changes the output)" in report
    with strata.load(FIXTURE, spec=1, **budget) as model:
        assert (model.settings.defer_cpu, model.settings.spec) == ("1", 1)
    points = load_profile(profile).points
    least = min(p.worst_kl / 2 for p in points if p.kl)
    with strata.load(FIXTURE, **(budget | {"quality_budget": least / 2})) as model:
        assert (model.settings.defer_cpu, model.settings.spec) == ("0", 2)
    with strata.load(FIXTURE, **(budget | {"quality_budget": 0})) as model:
        assert (model.settings.defer_cpu, model.settings.spec) == ("0", 1)
    for more in ({"defer_cpu": "1"}, {"route_tail_skip": 2}):
        for amount in (0, 10):
            with pytest.raises(SettingError, match="the budget decides what may be lossy"):
                strata.load(FIXTURE, **(budget | more | {"quality_budget": amount}))
    with pytest.raises(SettingError, match=r"nothing that .* measured with --spec 4 is within it"):
        strata.load(FIXTURE, spec=4, **budget)
    with pytest.raises(InputError, match="was measured with expert-cache = auto, here it is 3"):
        strata.load(FIXTURE, expert_cache=3, **budget)
    with pytest.raises(InputError, match="was measured with workers = 1, here it is 2"):
        strata.load(FIXTURE, **(budget | {"workers": 2}))
    other = FIXTURE.parent / "q8_0.gguf"
    with pytest.raises(InputError, match="has no profile of this model on this machine"):
        strata.load(other, **budget)
    here = fingerprints.machine_facts()
    monkeypatch.setattr(tuned, "machine_facts", lambda: replace(here, processor="Another 9000"))
    with pytest.raises(InputError, match=r"of another machine \(.*none of this one \(Another 9000"):
        strata.load(FIXTURE, **budget)


def test_moved_and_damaged_profiles(profile: Path, tmp_path: Path) -> None:
    """A profile renamed to another model's place, and one with missing parts."""
    stored = json.loads(profile.read_text())
    budget = {**LOADED, "quality_budget": 10.0, "profile_dir": profile.parent}
    profile.write_text(json.dumps(stored | {"model": "0" * 32}))
    with pytest.raises(InputError, match="belongs to another model or machine"):
        strata.load(FIXTURE, **budget)
    for damage in ({"version": 99}, {"points": [{"kl": 1}]}, {"texts": 3}):
        profile.write_text(json.dumps(stored | damage))
        with pytest.raises(FormatError, match="run strata tune again"):
            strata.load(FIXTURE, **budget)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one two three", encoding="utf-8")
    call = ["tune", str(FIXTURE), "--text", str(text), "--device", "cpu"]
    for more, message in (
        (["--kl-budget", "-1"], "must be a number of at least 0"),
        (["--windows", "1,9"], "must be window sizes of 1 to 8"),
        (["--quality-budget", "0.1"], "tune finds what --quality-budget uses"),
        (["--defer-cpu", "1"], "would change the reference"),
    ):
        assert cli.main([*call, *more]) == 2
        assert message in capsys.readouterr().err


def test_profiles_go_to_the_users_data() -> None:
    """XDG base directories: the variable if it is absolute, else ~/.local/share."""
    assert user_data_dir({"XDG_DATA_HOME": "/data"}) == Path("/data")
    usual = Path.home() / ".local" / "share"
    assert user_data_dir({}) == user_data_dir({"XDG_DATA_HOME": "data"}) == usual
    assert tuned.profile_folder(Settings(profile_dir="here")) == Path("here")


def test_pcie_shares_keep_the_quality_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the best point is timed again with each share; its change stays as measured."""
    best = Point({"defer_cpu": "1", "spec": "2"}, 30.0, 0.0, 0.01, 0.02, 0.9)
    opened: list[str] = []

    def opener(share: str) -> strata.Model:
        opened.append(share)
        return strata.load(FIXTURE, **LOADED)

    def speed(engine: Engine, settings: Settings, text: Text) -> float:
        assert (settings.defer_cpu, settings.spec) == ("1", 2)
        return 10.0 * len(opened)

    measured: Callable[..., list[Point]] = Tuner([TEXT], 0.1, speed=speed, rounds=1).shares
    points = measured(best, opener)
    assert [p.settings["pcie_frac"] for p in points] == opened == list(tune.SHARES)
    assert all((p.kl, p.worst_kl) == (best.kl, best.worst_kl) for p in points)
    assert [p.tokens_s for p in points] == [10.0, 20.0, 30.0, 40.0]


def test_profile_of_what_was_chosen() -> None:
    """choose: fastest within the budget, of one window size if asked; none is None."""
    slow, fast = Point({}, 1, 0, 0, 0, 1), Point({"spec": "2"}, 2, 0, 0.01, 0.01, 1)
    made = TunedProfile("m", "h", "", {}, (), "", (slow, fast))
    assert made.choose(0.02) is fast and made.choose(0.001) is slow and made.choose(0.02, 1) is slow
    assert made.choose(0.001, 2) is None
