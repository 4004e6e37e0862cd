"""Calls that cannot be: one clear line that names the thing, code 2, before the work and not after.

Expectations: the exit codes of ``strata.cli`` and the options' help. ``{m}`` is a model of experts,
``{d}`` a dense one, ``{t}`` a text, ``{f}`` a folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from strata import cli

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = ("run {} hi", "inspect {}", "plan {}", "explain {}", "doctor {}", "serve {}",
          "quality {} --text {t}", "tune {} --text {t}", "logpos {} --text {t} --out {f}/o",
          "bench {}")  # fmt: skip
BAD_MODELS = (
    ("{f}/none.gguf", "none.gguf"),
    ("{f}/empty", "empty holds no .gguf"),
    ("{f}/zero.gguf", "zero.gguf is empty"),
    ("{f}/noise.gguf", "not a GGUF file"),
    ("{t}", "neither GGUF nor safetensors"),
    ("/dev/null", "/dev/null"),
)
CALLS = (
    ("", "usage: strata"),
    ("rnu", "did you mean 'run'?"),
    ("run", "MODEL"),
    ("run {m} ''", "the prompt is empty"),
    ("run '' hi", "path is empty"),
    ("run {m} hi --contxt 3", "did you mean '--context'?"),
    ("run {m} hi --port 3", "--port has no effect here: it is a setting of strata serve"),
    ("plan {m} --temperature 1", "--temperature has no effect here: it is about sampling"),
    ("run {m} hi --spec 0", "--spec 0: must be between 1 and 8"),
    ("run {m} hi --spec 4 --draft none", "exclude each other"),
    ("run {m} hi --max-tokens -1", "--max-tokens -1: must be 1 or more"),
    ("run {m} hi --temperature hot", "--temperature hot: must be a number"),
    ("run {m} hi --ram-gb 0.01", "available (limited by --ram-gb 0.01)"),
    ("run {m} hi --logpos {f}", "--logpos {f}: cannot be written"),
    ("run {m} hi --expert-profile-save {f}/none/x", "its folder does not exist"),
    ("run {m} hi --park-dir {t}", "--park-dir {t}: conversations cannot be kept there"),
    ("run {m} hi --pack {t}/x", "--pack {t}/x"),
    ("run {m} hi --config {f}/none.toml", "none.toml: No such file"),
    ("run {d} hi --adapt-swaps 3", "--adapt-swaps: llama has no routed experts"),
    ("run {d} hi --expert-profile-save {f}/x", "has no routed experts"),
    ("explain {m} --window 9", "--window 9: must be between 1 and 8"),
    ("logpos {m} --text {f} --out {f}/o", "--text {f}: Is a directory"),
    ("logpos {m} --text {t} --out {f}", "--out {f}: cannot be written"),
    ("logpos {m} --text {t} --out {f}/o --logpos {f}/b", "--logpos (--logpos) is about answers"),
    ("quality {m} --text {f}/zero.gguf", "zero.gguf is empty"),
    ("quality {m} --text {f}/noise.gguf", "is not UTF-8 text"),
    ("quality {m} --text {t} --json {f}", "--json {f}: cannot be written"),
    ("quality {m} --text {t} --plot {f}/x.txt", "a plot's name ends in .png, .svg, .pdf"),
    ("quality --compare {t} {t}", "text.txt is no whole quality file: it is no NumPy archive"),
    ("quality --compare {t} {t} --json {f}/x", "--json has no effect with --compare"),
    ("quality --compare {t} {t} --defer-cpu 1", "--defer-cpu has no effect with --compare"),
    ("bench cache {m} --device cpu --layers 3", "--layers has no effect on a model's own trace"),
    ("bench cache --trace {t} --tokens 9", "--tokens has no effect on a trace that was kept"),
    ("bench cache --kv q4", "--kv has no effect without MODEL"),
    ("bench cache {m} --device cpu --slots 0", "--slots 0: 0 is 0 of"),
    ("doctor --kv q4", "--kv has no effect without MODEL"),
    ("doctor --device cpu --check", "--check has no effect without MODEL"),
    ("quality {m} --text {t} --spec 2", "--spec is about answers"),
    ("tune {m} --text {t} --spec 2", "the window sizes that are tried are --windows"),
    ("plan {m} --quality-budget 0.02 --defer-cpu 1", "exclude each other: the budget decides"),
    ("quality {m} --compare {t} {t}", "--compare takes two stored files"),
    ("bench --compare {t} --rounds 3", "--rounds has no effect with --compare"),
    ("bench {m} --compare {t}", "MODEL has no effect with --compare"),
    ("tune {m} --text {t} --profile-dir {t}", "--profile-dir {t}: profiles cannot be kept there"),
    ("tune {m} --text {t} --kl-budget nan", "--kl-budget nan"),
    ("bench {m} --json {f}/none/x.json", "its folder does not exist"),
    ("bench {m} --rounds 0", "--rounds 0: must be between 1"),
    ("bench {m} --synthetic qwen4_exp-125b:IQ3_S", "give either MODEL or --synthetic"),
    ("bench cpu --json {f}", "--json {f}: cannot be written"),
    ("bench cpu --against foo", "--against foo"),
    ("bench serve foo", "foo: the address must begin with http"),
    ("serve {m} --host 0.0.0.0", "no --api-key"),
    ("serve {m} --port 99999", "--port 99999: must be between 0 and 65535"),
)
ON_CPU = ("run", "explain", "quality", "tune", "logpos", "bench", "serve")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.txt").write_text("hello there")
    (folder / "zero.gguf").touch()
    (folder / "noise.gguf").write_bytes(bytes(range(255, 0, -1)) * 20)
    (folder / "empty").mkdir()
    return {
        "m": str(FIXTURES / "qwen3_moe" / "bf16.gguf"), "t": str(folder / "text.txt"),
        "d": str(FIXTURES / "llama" / "bf16.gguf"), "f": str(folder),
    }  # fmt: skip


def refused(call: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line."""
    words = [word.format(**names) for word in call.replace("''", "\0").split()]
    words = ["" if word == "\0" else word for word in words]
    if (
        words
        and words[0] in ON_CPU
        and "--compare" not in words
        and words[1:2] not in (["cpu"], ["serve"])
    ):
        words += ["--device", "cpu"]
    capsys.readouterr()
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    said = (shown.err or shown.out).strip()
    assert "Traceback" not in said
    if shown.err:
        assert said.startswith("strata: ") and "\n" not in said
    return said


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_a_bad_call_is_one_line(
    call: str, words: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path(names["f"]).iterdir())
    assert words.format(**names) in refused(call, names, capsys)
    assert sorted(Path(names["f"]).iterdir()) == before, "something was left behind"


@pytest.mark.parametrize("command", MODELS)
@pytest.mark.parametrize(("model", "words"), BAD_MODELS)
def test_what_is_no_model_is_one_line(
    command: str,
    model: str,
    words: str,
    names: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command.startswith("serve"):  # a file that is there is opened by the engine's process
        model, words = "{f}/none.gguf", "none.gguf: No such file"
    assert words in refused(command.replace("{}", model), names, capsys)
