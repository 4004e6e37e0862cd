"""What cannot be is refused before a weight is read, and a plan says what would have nothing to do.

Expectations: the settings' help and what the same calls were refused with after loading.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from strata import cli
from strata.engine import build

MODEL = Path(__file__).parent.parent / "models" / "tiny-flash-next-Q8_0.gguf"
DENSE = Path(__file__).parent / "fixtures" / "llama" / "bf16.gguf"
AUTO = "--defer-cpu 1 --defer-cpu-below auto --defer-below-profile"
CALLS = (
    ("run {m} 'one two three' --device cpu --context 3", "but the context holds 3"),
    ("run {d} hi --system be --device cpu", "chat template"),
    ("chat {d} --device cpu", "has no chat template"),
    ("logpos {m} --text {t} --out {f}/o --device cpu --context 3", "but the context holds 3"),
    (f"run {{m}} hi --device cpu {AUTO} {{t}}", "{t} holds no times of version 1"),
    (f"run {{m}} hi --device cpu {AUTO} {{f}}/p.json", "p.json belongs to another model"),
    ("quality {m} --text {t} --device cpu --context 3", "but the context holds 3"),
    ("quality {m} --text {t} --device cpu --arms context=3", "but the context holds 3"),
    ("quality {m} --text {t} --device cpu --defer-cpu 1", "--defer-cpu would change the reference"),
    ("quality {m} --text {t} --device cpu --arms defer_cpu=1,defer_layers=99",
     "arm defer_cpu=1,defer_layers=99: --defer-layers 99: these cannot be late"),
    ("quality {m} --text {t} --device cpu --arms expert_cache=769",
     "arm expert_cache=769: --expert-cache 769: this model has only 768 experts"),
    ("quality {m} --text {t} --device cpu --arms kv=int8,dtype=float64", "exclude each other"),
    ("tune {d} --text {t} --device cpu", "nothing to tune"),
    ("tune {m} --text {t} --device cpu --context 11", "no room to decode behind 10 tokens"),
    ("plan {m} --vram-gb 4 --expert-layout native", "experts of type Q8_0 lie in the file's own"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_it_is_refused_before_loading(
    call: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights are being read")

    monkeypatch.setattr(build, "_assemble", load)
    text = tmp_path / "text"
    text.write_text("A file is a thing that has a name.")
    stored = {"format": "strata times", "version": 1, "model": "x", "machine": "y", "resident": "z"}
    (tmp_path / "p.json").write_text(json.dumps(stored))
    names = {"m": MODEL, "d": DENSE, "t": text, "f": tmp_path}
    monkeypatch.setenv("STRATA_PROFILE_DIR", str(tmp_path))
    assert cli.main(shlex.split(call.format(**names))) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert message.format(**names) in line


def test_times_that_fit_are_read_after_loading_only_where_rows_are_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every expert cached nothing is late, so the file is not looked at: "off here"."""
    wrong = tmp_path / "p.json"
    wrong.write_text("{}")
    words = f"run {MODEL} hi --device cpu --max-tokens 1 --expert-cache 768 {AUTO} {wrong}".split()
    assert cli.main(words) == 0
    assert "defer-below-profile = " in (err := capsys.readouterr().err)
    assert "off here: every expert is in the fast tier" in err


def test_a_plan_says_what_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    """The reasons are those of the start-up report (engine/off_here.py)."""
    asked = f"plan {MODEL} --device cpu --pcie-frac 0.5 --quality-meter 1/64".split()
    assert cli.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "--pcie-frac 0.5: off here: there is no GPU to read experts over PCIe",
        "--quality-meter 1/64: off here: every window is exact, so there is nothing to compare",
    ]
    assert cli.main([*asked, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["off_here"]) == {"pcie_frac", "quality_meter"}
    assert cli.main(["plan", str(MODEL), "--device", "cpu"]) == 0
    assert "off here" not in capsys.readouterr().out
