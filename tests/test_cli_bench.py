"""strata bench and strata doctor through the command line: what is printed, kept and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.cli import main

PATH = str(Path(__file__).parent / "fixtures" / "qwen3_moe" / "bf16.gguf")
TINY = ["--device", "cpu", "--context", "256", "--prompts", "2", "--tokens", "3", "--rounds", "1"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that are made but not looked at take little time."""
    monkeypatch.setattr("strata.bench.predict.TURNS", 2)
    monkeypatch.setattr("strata.engine.layout_cost._READ_BYTES", 8 << 20)
    monkeypatch.setattr("strata.bench.speed.RANDOM_PROMPT_TOKENS", 20)


def test_arms_are_measured_kept_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two arms on one engine, a third appended by another call, all in one table; a budget that
    differs is refused."""
    file = str(tmp_path / "r.json")
    assert main(["bench", PATH, *TINY, "--arms", "off,defer", "--json", file]) == 0
    out = capsys.readouterr().out
    assert "defer against off: predicted" in out and "nothing to overlap" in out
    assert "attention, experts" in out and "off: a window moves" in out
    more = ["--arms", "check", "--no-layers", "--json", file, "--append"]
    assert main(["bench", PATH, *TINY, *more]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in table] == ["arm", "off", "defer", "check"]
    records = json.loads(Path(file).read_text())
    assert {r["model"] for r in records} == {PATH} and len(records[0]["runs"]) == 2
    assert records[1]["arm_settings"] == {"defer_cpu": "1"} and records[0]["dense_bytes"] > 0
    assert main(["bench", PATH, *TINY, *more, "--cap-slots", "3"]) == 2
    assert "differ in expert-cache" in capsys.readouterr().err


def test_an_engine_for_each_arm(capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["--arms", "none=expert-cache:0,some=expert-cache:4", "--no-layers", "--force"]
    assert main(["bench", PATH, *TINY, *arms]) == 2
    assert "add --fresh" in capsys.readouterr().err
    assert main(["bench", PATH, *TINY, *arms, "--fresh"]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    assert " 0.0%" in table[1] and " 0.0%" not in table[2].split("..")[1][10:45]


def test_long_prompts_and_a_recorded_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts of the long length, with room made for them; the trace that the model's own
    router gave is taken, and one of other sizes refused."""
    monkeypatch.setattr("strata.cli_bench_speed.LONG_TOKENS", 90)
    kept, other, file = (str(tmp_path / n) for n in ("t.npy", "o.npy", "r.json"))
    assert (
        main(["bench", "cache", PATH, "--device", "cpu", "--tokens", "6", "--save-trace", kept])
        == 0
    )
    words = ["bench", PATH, "--device", "cpu", "--tokens", "3", "--rounds", "1", "--no-layers"]
    assert main([*words, "--long", "--trace", kept, "--json", file]) == 0
    (record,) = json.loads(Path(file).read_text())
    assert [run[2] for run in record["runs"]] == [90, 90, 90]
    assert record["context"] == 90 + 3 + 24 + 16 and record["locality"]["overlap"] >= 0
    assert main(["bench", "cache", "--layers", "1", "--tokens", "9", "--save-trace", other]) == 0
    capsys.readouterr()
    assert main([*words, "--trace", other]) == 2
    assert "the model has 3 layers of 8 experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, why",
    [
        (["bench"], "give either MODEL or --synthetic"),
        (["bench", PATH, "--layers", "2"], "make a synthetic model smaller"),
        (["bench", PATH, "--accept", "2"], "--accept needs --window"),
        (["bench", PATH, "--window", "9"], "--window 9: different numbers between 1 and 8"),
        (["bench", PATH, "--window", "2", "--accept", "3"], "--accept 3: must be between"),
        (["bench", PATH, "--prompts", "13"], "--prompts 13: must be between 1 and 12"),
        (["bench", PATH, "--locality", "1,0", "--trace", "x"], "exclude each other"),
        (["bench", PATH, "--slots", "9,0", "--cap-slots", "3"], "--slots and --cap-slots exclude"),
        (["bench", PATH, "--cap-slots", "3", "--expert-cache", "4"], "exclude each other"),
        (["bench", PATH, "--vram-gb", "3", "--cap-vram", "4"], "exclude each other"),
        (["bench", PATH, "--window", "2", "--spec", "4"], "--window and --spec exclude"),
        (["bench", PATH, "--threads", "1", "--workers", "2"], "--threads and --workers exclude"),
        (["bench", PATH, "--long", "--prompts", "2"], "--long and --prompts exclude"),
        (["bench", PATH, "--append"], "--append needs --json"),
        (["bench", "synthetic:none:Q4_K"], "is no synthetic model"),
        (["doctor", PATH, "--synthetic", "a:b"], "give either MODEL or --synthetic"),
    ],
)
def test_bad_calls(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *([] if "--device" in words else ["--device", "cpu"])]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, why",
    [
        (["--arms", "off,x=defer-cpu:1+defer-layers:99"], "arm x: --defer-layers 99: these cannot"),
        (["--arms", "x=expert-cache:99"], "arm x: --expert-cache 99: this model has only"),
        (["--arms", "off,x=kv:int8"], "arm x changes kv, which is fixed when a model is loaded"),
        (["--slots", "4,0", "--adapt-swaps", "2"], "exclude --adapt-swaps"),
        (["--context", "3"], "prompt and answer take 4 tokens or more, the context holds 3"),
        (["--trace", "none.npy"], "routing trace none.npy: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arms and traces are held against the model's metadata, which is there before its weights."""

    def load(*_: object) -> None:
        raise AssertionError("weights are being read")

    monkeypatch.setattr("strata.engine.build._assemble", load)
    assert main(["bench", PATH, *TINY, *words]) == 2
    assert why in capsys.readouterr().err


def test_a_synthetic_model_with_a_trace_in_windows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--synthetic", "qwen3-30b-a3b:Q4_K_M", "--layers", "2", "--experts", "9", "--vocab",
             "64", "--window", "2", "--accept", "2", "--no-layers"]  # fmt: skip
    assert main(["bench", *TINY, *words, "--prompts", "1"]) == 0
    captured = capsys.readouterr()
    assert "routing trace: overlap" in captured.err
    assert captured.out.splitlines()[1].split()[5] == "1.50", "3 tokens in windows of 2 and 1"


def test_every_cell_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Two arms in windows of 1 and 3, of which at most 2 tokens are kept (C50: each cell, not the
    best one)."""
    words = ["--arms", "off,check", "--window", "1,3", "--accept", "2", "--no-layers"]
    assert main(["bench", PATH, *TINY, "--tokens", "4", *words]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-8:]]
    assert [t[2] for t in table[::4]] == ["1:", "3:"]
    assert [(t[0], t[5]) for t in (*table[2:4], *table[6:])] == [
        ("off", "1.00"), ("check", "1.00"), ("off", "2.00"), ("check", "2.00"),
    ]  # fmt: skip


def test_sizes_of_the_fast_tier_on_one_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All 24 experts, then 6: a table each, hits of all and of some, bytes by where they are read,
    predictions beside what is measured, and what was kept when the second table was not begun."""
    file = str(tmp_path / "r.json")
    words = ["--slots", "24,6", "--at", "8", "--window", "1", "--predict", "--no-layers"]
    assert main(["bench", PATH, *TINY, *words, "--json", file]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("off ") == 2 and "predicted" in captured.out
    assert "loaded in" in captured.err and "6 experts in the fast tier, predicted" in captured.err
    first, second = json.loads(Path(file).read_text())
    assert (first["expert_cache"], second["expert_cache"]) == (24, 6)
    assert first["hit_rate"] == 1.0 and second["hit_rate"] < 1.0
    moved = [r["bytes_token"] for r in (first, second)]
    assert moved[0]["cpu_experts"] == 0 < moved[1]["cpu_experts"]
    assert moved[1]["cached_experts"] < moved[0]["cached_experts"]
    assert all(
        r["predicted_ms_window"] > 0 and sum(r["load_s"].values()) > 0 for r in (first, second)
    )


def test_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """Machine, plan and prediction; a model that does not fit is refused with numbers."""
    assert main(["doctor", PATH, "--device", "cpu", "--context", "128", "--check"]) == 0
    out = capsys.readouterr().out
    assert "NUMA nodes" in out and "\nfits\n" in out and "predicted: " in out
    assert "measured: " in out and "% of that time off" in out
    assert main(["doctor", PATH, "--device", "cpu", "--ram-gb", "0.01"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: ram needs" in out and "predicted" not in out
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "read by the CPU" in capsys.readouterr().out
