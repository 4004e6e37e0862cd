"""C47: records and tables: kept and added to, refused where a comparison would be unfair."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.bench.machine import Bandwidths
from strata.bench.protocol import Measured, Run, Usage
from strata.bench.report import load_records, plot, record_of, require_comparable, save_records
from strata.bench.report import table as table_of
from strata.bench.traffic import Traffic, limit_of
from strata.core.errors import InputError, SettingError
from strata.core.types import Place


def record(arm: str, seconds: float, **facts: object) -> dict[str, object]:
    """An arm of two prompts, 10 tokens each in so many seconds."""
    runs = [Run(arm, 0, p, 5, tokens=10, seconds=seconds, windows=10) for p in range(2)]
    usage = Usage(windows=2, tokens=2, distinct={Place.FAST: 3, Place.CPU: 9})
    measured = Measured(runs, {arm: Run(arm, -1, 0, 5, 10, 4.0, 10)}, {arm: usage}, [100.0])
    return record_of(measured, arm, {"model": "m", "expert_cache": 0, **facts})


def test_records_come_back_and_compare(tmp_path: Path) -> None:
    first, second = record("off", 2.0), record("defer", 1.0)
    assert first["tokens_s"] == 5.0 and first["cold_tokens_s"] == 2.5
    assert first["hit_rate"] == 0.25 and first["distinct_experts"] == {"FAST": 1.5, "CPU": 4.5}
    path = tmp_path / "r.json"
    assert load_records(path) == []
    save_records(path, [first])
    save_records(path, [*load_records(path), second])
    lines = table_of(load_records(path))
    assert len(lines) == 3 and "25.0%" in lines[1]
    assert lines[2].startswith("defer") and lines[2].endswith("+100.0 % (+100.0 to +100.0)")


def test_unfair_comparisons_are_refused() -> None:
    require_comparable([record("a", 1.0), record("b", 2.0)])
    with pytest.raises(SettingError, match=r"differ in expert-cache \(a: 0, b: 5\).*--force"):
        require_comparable([record("a", 1.0), record("b", 2.0, expert_cache=5)])


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text in ("not json", '{"a": 1}', '[{"arm": "x"}]'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InputError, match="is not a file of strata bench"):
            load_records(tmp_path / "x.json")


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot([record("a", 1.0), record("b", 2.0)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_the_limit_by_hand() -> None:
    """Dense 100 bytes, experts of 10: 2 cached and 4 elsewhere."""
    traffic = Traffic(100, (10, 0, 10), (8, 0, 8), (3, 0, 3))
    assert traffic.routed_bytes == 60 and traffic.all_expert_bytes == 160
    distinct = {Place.FAST: 2.0, Place.CPU: 3.0, Place.PCIE: 1.0}
    cpu = limit_of(traffic, distinct, Bandwidths(host=16.0), "cpu")
    assert cpu.seconds == pytest.approx(160 / 16) and cpu.share(20.0) == pytest.approx(0.5)
    gpu = limit_of(traffic, distinct, Bandwidths(8.0, 60.0, 4.0, 10.0), "cuda")
    assert gpu.seconds == pytest.approx(max(120 / 60, 40 / 10))
