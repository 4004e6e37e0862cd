"""The quality report against plain sums over logits of separately loaded models, stored files, and
what is refused (C48, C49, C50)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import strata
from strata import cli
from strata.core.divergence import log_softmax
from strata.core.errors import FormatError, InputError, NumericsError, SettingError
from strata.engine.model import Model
from strata.quality.arms import Arm, parse_arms, scale_rank
from strata.quality.measure import Reference, read_windows
from strata.quality.protocol import Protocol
from strata.quality.record import Head, Recording, compare_recordings, load_recording
from strata.quality.report import report_lines, table_lines
from strata.quality.texts import Text

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "bf16.gguf"
RNG = np.random.default_rng(4)
TEXTS = [Text(name, tuple(RNG.integers(8, 300, n).tolist())) for name, n in (("a", 67), ("b", 11))]
ARMS = "off;defer_cpu=1;defer_cpu=1,defer_cpu_below=0.3;expert_cache=0,defer_cpu=1"


def opened(**settings: object) -> Model:
    return strata.load(FIXTURE, device="cpu", workers=1, context=128, **settings)


@pytest.mark.parametrize("window", [1, 4])
def test_table_equals_plain_sums(window: int) -> None:
    """Arms as variants of one engine and as an engine of their own, against models loaded for each
    setting and sums written out here (C50: partly and not cached, windows of 1 and 4)."""
    protocol = Protocol("m", "here", TEXTS, parse_arms(ARMS), window)
    model = opened(expert_cache=20)
    report = protocol.run(model, lambda arm: opened(expert_cache=0, defer_cpu="1"))
    model.close()
    n_active = 3
    expected = {
        "floor": {"expert_cache": 20},
        "check": {"expert_cache": 20, "defer_cpu": "check"},
        "scale": {"expert_cache": 20, "route_tail_skip": scale_rank(n_active)},
        "defer_cpu=1": {"expert_cache": 20, "defer_cpu": "1"},
        "defer_cpu=1,defer_cpu_below=0.3": {
            "expert_cache": 20, "defer_cpu": "1", "defer_cpu_below": 0.3,
        },
        "expert_cache=0,defer_cpu=1": {"expert_cache": 0, "defer_cpu": "1"},
    }  # fmt: skip
    assert [arm.name for arm in report.arms] == list(expected)
    with opened(expert_cache=20) as exact:
        assert exact.engine.runner.network.n_active == n_active
        wanted = [exact.logits(t.tokens, through="windows", window=window) for t in TEXTS]
    for arm in report.arms if window == 4 else report.arms[2:4]:
        with opened(**expected[arm.name]) as own:
            ours = [own.logits(t.tokens, through="windows", window=window) for t in TEXTS]
        plain = [row for a, b in zip(wanted, ours, strict=True) for row in plain_scores(a, b)]
        at = np.array([i for text in TEXTS for i in range(len(text.tokens))])
        full, top, same = (np.array(x) for x in zip(*plain, strict=True))
        for bucket, inside in zip(
            arm.buckets, (at < 8, (at > 7) & (at < 64), at > 63, at >= 0), strict=True
        ):
            assert bucket.n == inside.sum()
            assert bucket.kl == pytest.approx(full[inside].mean(), abs=1e-9)
            assert bucket.kl_top == pytest.approx(top[inside].mean(), abs=1e-9)
            assert bucket.top1 == same[inside].mean()
        assert arm.all.p99 == pytest.approx(np.percentile(top, 99), abs=1e-9)
        assert arm.all.perplexity == pytest.approx(plain_perplexity(ours), rel=1e-9)
    by_name = {arm.name: arm.all.kl_top for arm in report.arms}
    assert by_name["floor"] == 0
    assert by_name["check"] < 1e-4 < by_name["defer_cpu=1,defer_cpu_below=0.3"]
    assert by_name["defer_cpu=1,defer_cpu_below=0.3"] < by_name["defer_cpu=1"]
    assert by_name["scale"] > 1e-4


def plain_scores(reference_TV: np.ndarray, other_TV: np.ndarray) -> list[tuple[float, float, bool]]:
    """(full KL, top-20 KL, same best) of each row, by the definitions."""
    found = []
    for a, b in zip(reference_TV.astype(np.float64), other_TV.astype(np.float64), strict=True):
        p, q = (np.exp(x) / np.exp(x).sum() for x in (a - a.max(), b - b.max()))
        top = np.argsort(-p, kind="stable")[:20]
        rest = (1 - p[top].sum()) * np.log((1 - p[top].sum()) / (1 - q[top].sum()))
        top_kl = (p[top] * np.log(p[top] / q[top])).sum() + rest
        found.append(((p * np.log(p / q)).sum(), max(top_kl, 0.0), p.argmax() == q.argmax()))
    return found


def plain_perplexity(logits: list[np.ndarray]) -> float:
    told = []
    for text, rows in zip(TEXTS, logits, strict=True):
        for row, target in zip(rows[:-1], text.tokens[1:], strict=True):
            told.append(float(log_softmax(row)[target]))
    return float(np.exp(-np.mean(told)))


def test_report_says_what_is_off_and_what_did_nothing() -> None:
    """C45, C49: a standard row that cannot be, and an arm that had nothing to do, say why; the
    report holds model and settings."""
    with opened() as model:
        n_pairs = sum(len(a) for a in model.engine.service.tier.address_LE)
    with opened(expert_cache=n_pairs) as model:
        protocol = Protocol("m", "here", TEXTS[1:], parse_arms("route_tail_skip=1;defer_cpu=1"))
        report = protocol.run(model)
    text = "\n".join(report_lines(report))
    assert "scale: not measured: every expert is in the fast tier" in text
    assert "route_tail_skip=1: route_tail_skip is off here: every expert is in the fast" in text
    assert "defer_cpu=1: " in text and ("off here" in text or "no row was late" in text)
    assert f"{n_pairs} of {n_pairs} experts" in text and f"expert_cache={n_pairs}" in text
    assert all(arm.all.kl_top == 0 for arm in report.arms)


def test_stored_runs_compare_like_the_run_itself(tmp_path: Path) -> None:
    """Top-20 KL, agreement and perplexity of two files equal the report's to float32."""
    recordings: dict[str, Recording] = {}
    with opened(expert_cache=20) as model:
        arms = parse_arms("defer_cpu=1")
        report = Protocol("m", "here", TEXTS[1:], arms, 1, recordings=recordings).run(model)
    for name, recording in recordings.items():
        recording.save(tmp_path / f"{name}.npz")
    off, late = (load_recording(tmp_path / f"{n}.npz") for n in ("off", "defer_cpu=1"))
    again = compare_recordings(off, late, ("off", "late"))
    whole = next(arm for arm in report.arms if arm.name == "defer_cpu=1").all
    assert again.all.kl_top == pytest.approx(whole.kl_top, rel=1e-4)
    assert again.all.top1 == whole.top1 and again.all.kl is None
    assert again.all.perplexity == pytest.approx(whole.perplexity, rel=1e-5)
    assert compare_recordings(off, off, ("off", "off")).all.kl_top <= 1e-6
    assert off.head.settings["expert_cache"] == "20" and late.head.settings["defer_cpu"] == "1"
    assert "defer_cpu=1" in "\n".join(table_lines([again]))


def recording(rows_TV: np.ndarray, **head: object) -> Recording:
    facts = {
        "arm": "x", "model": "m", "n_vocab": rows_TV.shape[1], "tokenizer": "t",
        "texts": (("a", "digest", len(rows_TV)),), "window": 1, "settings": {}, "machine": "",
    }  # fmt: skip
    made = Recording(Head(**{**facts, **head}))
    for t, row in enumerate(rows_TV):
        made.add(0, t, log_softmax(row), None)
    return made


def test_c48_peaked_row_of_150_000_tokens_through_a_file(tmp_path: Path) -> None:
    """KL with itself at most 1e-6; the same suppressed tokens in both are finite."""
    rows = np.random.default_rng(0).normal(size=(3, 150_000)) * 3
    rows[1, 77] = 90.0
    rows[:, 1000:2000] = -np.inf
    made = recording(rows)
    made.save(tmp_path / "a.npz")
    again = load_recording(tmp_path / "a.npz")
    result = compare_recordings(made, again, ("a", "b"))
    assert result.all.kl_top <= 1e-6 and result.all.top1 == 1
    listed = np.exp(np.float64(again.logp[0])).sum()
    assert listed + np.exp(again.rest[0]) == pytest.approx(1, abs=1e-6)


def test_c48_few_possible_tokens() -> None:
    """19 tokens possible in both: nothing listed beyond them, finite."""
    a, b = np.random.default_rng(1).normal(size=(2, 2, 300))
    a[:, 19:] = b[:, 19:] = -np.inf
    result = compare_recordings(recording(a), recording(b), ("a", "b"))
    assert 0 < result.all.kl_top < np.inf


def test_c48_what_is_refused(tmp_path: Path) -> None:
    """Other vocabulary, tokenizer or text: both are named; NaN: its position; broken files."""
    rows = np.random.default_rng(2).normal(size=(4, 300))
    one = recording(rows)
    with pytest.raises(InputError, match=r"left has 300 tokens.*right has 299"):
        compare_recordings(one, recording(rows[:, :299]), ("left", "right"))
    with pytest.raises(InputError, match=r"left.*tokenizer t.*right.*tokenizer u"):
        compare_recordings(one, recording(rows, tokenizer="u"), ("left", "right"))
    other = recording(rows, texts=(("b", "another", 4),))
    with pytest.raises(InputError, match=r"left is a \(4 tokens\), of right b"):
        compare_recordings(one, other, ("left", "right"))
    one.logp[2][5] = np.nan
    one.save(tmp_path / "nan.npz")
    with pytest.raises(NumericsError, match="position 2 "):
        load_recording(tmp_path / "nan.npz")
    whole = (tmp_path / "nan.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match=r"cut\.npz is no whole quality file"):
        load_recording(tmp_path / "cut.npz")
    with pytest.raises(InputError, match="No such file"):
        load_recording(tmp_path / "none.npz")


def test_nan_in_a_run_names_arm_text_and_position() -> None:
    with opened() as model, Reference(70, model.engine.n_vocab):
        inner = model.engine.runner.run

        def broken(recorded, tokens):  # type: ignore[no-untyped-def]
            logits = inner(recorded, tokens)
            if model.engine.length == 8:
                logits[1, 3] = float("nan")
            return logits

        model.engine.runner.run = broken  # type: ignore[method-assign]
        with pytest.raises(NumericsError, match=r"arm late, a: the logits after position 9 "):
            list(read_windows(model.engine, TEXTS[0], 4, "late"))


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("defer_cpu", "is no list of name=value"),
        ("defer=1", "did you mean"),
        ("defer_cpu=2", "arm defer_cpu=2: --defer-cpu 2: must be one of"),
        ("defer_cpu_below=0.1", "needs --defer-cpu"),
        ("defer_cpu=1;defer_cpu=1", "is given twice"),
        ("temperature=1", "is about sampling"),
    ],
)
def test_arms_that_cannot_be(arms: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_arms(arms)


def test_arms_are_read() -> None:
    """Lists keep their commas; flag spelling is taken; off is the reference and gives no arm."""
    text = " off ; defer_cpu=1,defer-layers=1,2,defer_cpu_below=0.1;route_tail_skip=3;"
    first, second = parse_arms(text)
    assert first.overrides == {
        "defer_cpu": "1", "defer_layers": "1,2", "defer_cpu_below": "0.1",
    }  # fmt: skip
    assert second.is_variant and not Arm("x", {"expert_cache": "3"}).is_variant
    assert [scale_rank(k) for k in (10, 8, 4, 3, 2, 1)] == [7, 6, 3, 2, 1, 1]  # upstream: 7 of 10


def test_a_lossy_reference_is_refused() -> None:
    with (
        opened(defer_cpu="1") as model,
        pytest.raises(SettingError, match="would change the reference"),
    ):
        Protocol("m", "here", TEXTS, []).run(model)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report on standard output, JSON, quality files, and their comparison; mistakes are code 2."""
    text = tmp_path / "a.txt"
    text.write_text("The cat sat on the mat, and the dog did not. " * 2, encoding="utf-8")
    out, saved = tmp_path / "r.json", tmp_path / "runs"
    call = ["quality", str(FIXTURE), "--device", "cpu", "--workers", "1", "--text", str(text)]
    more = ["--arms", "off;defer_cpu=1", "--json", str(out), "--save", str(saved), "--tokens", "20"]
    assert cli.main([*call, *more]) == 0
    shown = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert [arm["name"] for arm in report["arms"]] == ["floor", "check", "scale", "defer_cpu=1"]
    assert report["texts"] == [["a.txt", 20]] and report["settings"]["workers"] == "1"
    assert "defer_cpu=1" in shown and "windows of 1, 20 positions" in shown
    for name, value in (("full KL", "kl"), ("p99", "p99")):
        table = shown[shown.index(f"\n{name}") :].splitlines()[1:]
        assert table[0].split() == [*name.split(), "0-7", "8-63", "64-639", "640+", "all"]
        buckets = report["arms"][3]["buckets"]
        cells = [f"{bucket[value]:.4f}" for bucket in buckets]
        assert table[4].split() == ["defer_cpu=1", *cells[:2], "-", "-", cells[-1]]
    pair = [str(saved / "off.npz"), str(saved / "defer_cpu=1.npz")]
    assert cli.main(["quality", "--compare", *pair]) == 0
    line = next(x for x in shown.splitlines() if x.startswith("defer_cpu=1 "))
    assert line.split()[1:3] == capsys.readouterr().out.splitlines()[-1].split()[1:3]
    for wrong, message in (
        (["quality"], "at least one --text"),
        (["quality", "--compare", *pair, "--text", str(text)], "neither a model nor texts"),
        ([*call, "--save", str(saved)], "is not an empty folder"),
        ([*call, "--text", str(text)], "given twice"),
        ([*call, "--tokens", "0"], "at least 1"),
        ([*call, "--defer-cpu", "1"], "would change the reference"),
        ([*call, "--context", "8"], "context holds 8"),
    ):
        assert cli.main(wrong) == 2
        assert message in capsys.readouterr().err


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    text = tmp_path / "a.txt"
    text.write_text("one two three four", encoding="utf-8")
    picture = tmp_path / "p.svg"
    call = ["quality", str(FIXTURE), "--device", "cpu", "--quiet", "--text", str(text)]
    assert cli.main([*call, "--plot", str(picture)]) == 0
    assert "scale" in capsys.readouterr().out and picture.stat().st_size > 1000
    assert cli.main([*call, "--plot", str(tmp_path / "p.xyz")]) == 2
