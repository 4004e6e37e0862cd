"""Numbers of ``strata bench cpu``: worked out by hand from made-up times; a tiny run end to end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from strata import cli_bench, cli_bench_cpu
from strata.bench import cpu, cpu_experts, cpu_memory
from strata.bench.cpu import Key, table_rows
from strata.bench.cpu_experts import down_type, expert_lines
from strata.bench.cpu_measure import Variant
from strata.bench.cpu_plot import bars, plot
from strata.bench.cpu_table import busy_line, cell, tables
from strata.core.errors import SettingError
from strata.native import CpuPool, available_isas
from strata.native.topology import Cpu, Topology, read_topology


def variant(key: Any, n_bytes: int) -> Variant[Any]:
    return Variant(key, n_bytes, lambda sample: 0.0)


READ, OURS = Key("read"), Key("tiles", "avx2", 4)
THEIRS = Key("native", "ggml", 4)


def made_up() -> list[dict[str, Any]]:
    """32e6 weights of 8.5 bits (34e6 bytes) and 4 rows; the machine halves its speed in a turn."""
    variants = [variant(READ, 100_000_000), variant(OURS, 34_000_000), variant(THEIRS, 34_000_000)]
    times = {
        READ: [0.010, 0.020, 0.010],
        OURS: [0.004, 0.008, 0.004],
        THEIRS: [0.012, 0.024, 0.012],
    }
    return table_rows("Q8_0", 2, 32_000_000, variants, times)


def test_a_row_of_the_table() -> None:
    """34 MB in 4 ms: 8.5 GB/s of 10; 4 x 32e6 weights in 4 ms: 32e9; ggml takes 12 ms."""
    ours, theirs = made_up()
    assert ours["gb_s"] == {
        "median": 8.5, "low": 6.38, "high": 8.5, "best": 8.5, "samples": 3
    }  # fmt: skip
    assert ours["gweights_s"]["median"] == 32.0
    assert ours["share"] == 0.85 and ours["bits"] == 8.5
    assert ours["times_ggml"] == 3.0
    label = {k: ours[k] for k in ("type", "layout", "kernels", "threads", "rows")}
    assert label == {
        "type": "Q8_0", "layout": "tiles", "kernels": "avx2", "threads": 2, "rows": 4
    }  # fmt: skip
    assert theirs["kernels"] == "ggml" and "times_ggml" not in theirs
    assert theirs["gb_s"]["median"] == 2.83 and theirs["share"] == 0.283
    assert cell(ours, "bytes", True) == "8.5  85%" and cell(ours, "weights", True) == "32.0 3.0x"
    assert cell(theirs, "weights", True) == "10.7"


def test_the_best_of_a_busy_machine() -> None:
    """Interrupted in most turns, but never in all: 34 MB in 4 ms of 10 GB/s; ggml 12 ms."""
    variants = [variant(READ, 100_000_000), variant(OURS, 34_000_000), variant(THEIRS, 34_000_000)]
    times = {READ: [0.05, 0.01, 0.09], OURS: [0.04, 0.07, 0.004], THEIRS: [0.012, 0.5, 0.9]}
    ours, _ = table_rows("Q8_0", 2, 32_000_000, variants, times)
    assert (ours["share_best"], ours["times_ggml_best"]) == (0.85, 3.0)
    assert cell(ours, "bytes", False) == "8.5  85%" and cell(ours, "weights", False) == "32.0 3.0x"


def test_bars_of_the_picture() -> None:
    """The dash is what reading allows: 32e9 weights/s at a share of 0.85."""
    found = {"rows": made_up(), "options": {"isas": ["avx2"]}}
    drawn = bars(found, 2, 4)
    assert list(drawn) == ["tiles", "ggml"]
    assert drawn["tiles"]["Q8_0"][1] == pytest.approx(32 / 0.85)
    assert bars(found, 1, 4) == {} and bars(found, 2, 1) == {}


def test_a_line_of_whole_experts() -> None:
    """A layer of 10 experts in 8 ms; 80 MB in 8 ms are 10 GB/s of 20."""

    class Pool:
        isa, workers = "avx2", 2

    variants = [variant(("read", 0), 10_000_000), variant(("native", 4), 80_000_000)]
    times = {("read", 0): [0.0005] * 3, ("native", 4): [0.008] * 3}
    (line,) = expert_lines("IQ3_S", Pool(), variants, times)  # type: ignore[arg-type]
    assert line["types"] == ["IQ3_S", "IQ3_S", "IQ4_NL"]
    assert line["layer_us"]["median"] == 8000.0 and line["gb_s"]["median"] == 10.0
    assert line["share"] == line["share_best"] == 0.5


@pytest.mark.parametrize(("name", "down"), [("Q8_0", "Q8_0"), ("Q2_0", "Q2_0"), ("Q4_K", "IQ4_NL")])
def test_down_matrices_of_640_columns(name: str, down: str) -> None:
    """Blocks of 256 do not divide 640."""
    assert down_type(name) == down


def test_a_busy_machine_is_said_so() -> None:
    quiet = {"other_programs_share": 0.01, "load_average_before": 0.1, "quiet": True}
    assert busy_line(quiet) == "the machine was quiet: other programs took 1% of its processors"
    busy = {"other_programs_share": 0.4, "load_average_before": 3.5, "quiet": False}
    assert busy_line(busy).startswith("THE MACHINE WAS BUSY: other programs took 40% of its")


REFUSED = [
    (["--types", "Q9_0"], r"--types Q9_0: no kernels for this type"),
    (["--types", "I8"], r"--types I8: no kernels"),
    (["--types", ""], r"--types '': give names"),
    (["--rows", "0"], r"--rows 0: must be a number between 1 and 16"),
    (["--rows", "1,x"], r"--rows x: must be"),
    (["--threads", "4096"], r"--threads 4096: must be a number between 1 and \d+"),
    (["--isa", "sse9"], r"unknown CPU instruction set 'sse9'"),
    (["--against", "blas"], r"--against blas: only ggml"),
    (["--seconds", "-1"], r"--seconds -1: must be a number between 0 and 3600"),
    (["--seconds", "nan"], r"--seconds nan"),
    (["--experts", "5"], r"--experts 5: must be 0, or between 40"),
    (["--json", "no/such/folder/x.json"], r"its folder does not exist"),
    (["--typs", "Q8_0"], r"unknown option --typs; did you mean '--types'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda x: " ".join(x))
def test_refused_before_any_work(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bench_cpu, "measure", lambda *a: pytest.fail("work began"))
    with pytest.raises(SettingError, match=message):
        cli_bench_cpu.main(arguments)


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench_cpu, "find_spec", lambda name: None)
    monkeypatch.setattr(cli_bench_cpu, "measure", lambda *a: pytest.fail("work began"))
    with pytest.raises(SettingError, match="--plot needs matplotlib"):
        cli_bench_cpu.main(["--plot", "x.png"])


def test_experts_outgrow_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 small experts would stay in a cache; as many are made as fill the memory asked for."""
    monkeypatch.setattr(cpu_experts, "D_MODEL", 512)
    monkeypatch.setattr(cpu_experts, "D_EXPERT", 64)
    experts = cpu_experts.make_experts("Q8_0", "tiles", 40, 8 << 20, 1 << 30)
    n, stride = experts.blobs.shape
    assert n > 40 and n * stride >= 8 << 20 > (n - 1) * stride
    assert (experts.blobs[1:] == experts.blobs[0]).all()
    assert cpu_experts.make_experts("Q8_0", "tiles", 40, 0, 1 << 30).n_experts == 40


def test_experts_of_a_machine_with_two_nodes(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them on each node, both layouts, told to the pool; every line is there."""
    here = read_topology().cpus[0].id
    two = Topology((Cpu(here, here, 0), Cpu(here + 1, here + 1, 1)))
    monkeypatch.setattr(cpu_experts, "read_topology", lambda: two)
    mine = CpuPool(1, [here], topology=two)
    memory = torch.ones(4 << 20, dtype=torch.uint8)
    lines = cpu_experts.measure_experts([mine], "Q8_0", (1, 2), 64, 1 << 30, 0, memory)
    assert [(line["layout"], line["rows"]) for line in lines] == [
        ("native", 1), ("native", 2), ("tiles", 1), ("tiles", 2)
    ]  # fmt: skip
    stride = 3 * 64 * 512 // 32 * 34
    halves = 2 * 32 * -(-stride // 256) * 256 / 2**30
    assert [line.endswith(f"{halves:.2f} GiB of experts") for line in mine.affinity] == [True] * 2
    assert mine.counters()["strays"] > 0
    mine.close()


def test_too_many_experts_for_the_memory() -> None:
    with pytest.raises(SettingError, match=r"512 Q8_0 experts take 2550 MiB in each layout and"):
        cpu_experts.make_experts("Q8_0", "native", 512, 1 << 20, 4 << 30)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory: what is tested is not speed."""
    monkeypatch.setattr(cpu, "cache_bytes", lambda: 0)
    monkeypatch.setattr(cpu_memory, "LEAST_BYTES", 4 << 20)
    monkeypatch.setattr(cpu_memory, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(cpu, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(cpu_experts, "D_MODEL", 512)
    monkeypatch.setattr(cpu_experts, "D_EXPERT", 64)


def test_a_tiny_run(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON file is what docs/DETAILS.md says: every combination asked for, once."""
    path = tmp_path / "cpu.json"
    asked = "cpu --types IQ3_S,F16 --rows 1,3 --threads 1 --seconds 0 --experts 40 --json"
    assert cli_bench.main([*asked.split(), str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["schema"] == cpu.SCHEMA
    n_lines = path.read_text().count("\n")
    assert n_lines < 30 + sum(len(found[key]) for key in ("read", "rows", "experts", "handover"))
    assert set(found) == {
        "schema", "machine", "options", "read", "rows", "experts", "handover"
    }  # fmt: skip
    isas = cpu.default_isas()
    assert found["options"]["isas"] == list(isas)
    keys = [(r["type"], r["layout"], r["kernels"], r["rows"]) for r in found["rows"]]
    wanted = [("IQ3_S", how, isa, n) for how in ("native", "tiles") for n in (1, 3) for isa in isas]
    assert keys == wanted + [("F16", "native", isa, n) for n in (1, 3) for isa in isas]
    for line in (*found["rows"], *found["experts"]):
        assert line["gb_s"]["low"] <= line["gb_s"]["median"] <= line["gb_s"]["high"]
        assert line["gb_s"]["median"] > 0 and line["share"] > 0
        assert line["gb_s"]["samples"] == 3
    assert [r["threads"] for r in found["read"]] == [1]
    assert [(e["types"][2], e["layout"]) for e in found["experts"]] == [
        ("IQ4_NL", "native"), ("IQ4_NL", "native"), ("IQ4_NL", "tiles"), ("IQ4_NL", "tiles"),
        ("F16", "native"), ("F16", "native"),
    ]  # fmt: skip
    assert found["machine"]["cores"] == read_topology().n_cores
    assert found["machine"]["isas"] == list(available_isas())
    (handover,) = found["handover"]
    assert handover["us"]["samples"] == 1000 and handover["us"]["median"] > 0
    printed = capsys.readouterr().out
    assert "1 thread: GB/s of weight bytes" in printed and "10 whole experts of 40" in printed


def test_json_keeps_every_value() -> None:
    """Expectation: what json reads back is what was given, empty tables too."""
    found = {"schema": "x", "a": {"b": [1, 2.5, None]}, "rows": made_up(), "empty": []}
    assert json.loads(cli_bench_cpu.json_text(found)) == found


def test_every_number_has_its_label(small: None) -> None:
    """Two kinds of kernels: each line of the tables names type, layout and kernels."""
    options = cpu.CpuOptions(
        ("Q2_0",), rows=(1,), threads=(1,), isas=("portable",), seconds=0, experts=0
    )
    seen: list[tuple[str, int, int]] = []
    found = cpu.measure(options, lambda *step: seen.append(step))
    assert [what for what, _, _ in seen] == ["reading memory", "Q2_0, 1 thread", "done"]
    assert [done for _, done, _ in seen] == [0, 1, 2] and {total for _, _, total in seen} == {2}
    text = io.StringIO()
    console = Console(file=text, width=120)
    for table in tables(found):
        console.print(table)
    lines = text.getvalue().splitlines()
    for layout, bits in (("native", "2.25"), ("tiles", "2.25")):
        assert any(
            all(word in line for word in ("Q2_0", layout, "portable", bits)) for line in lines
        )


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {
        "rows": made_up(),
        "options": {"isas": ["avx2"], "threads": [2], "rows": [4], "types": ["Q8_0"]},
        "machine": {"processor": "a processor", "other_programs_share": 0.0,
                    "load_average_before": 0.0, "quiet": True},
    }  # fmt: skip
    plot(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
