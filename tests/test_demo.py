"""The demo model through the public face and the command line; one text against another way to
compute it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import strata
from strata import cli
from strata.core.divergence import compare
from strata.core.errors import ContextLengthError, InputError, SettingError
from strata.core.types import TokenEvent

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-flash-next-Q8_0.gguf"
QUESTION = [{"role": "user", "content": "What does the ls command do?"}]
LISTS = "List:\n- one apple\n- two apples\n- one apple\n- two apples\n- one"
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"


@pytest.fixture(scope="module")
def plain() -> Iterator[strata.Model]:
    """Plain decoding, one worker, nothing cached."""
    with strata.load(MODEL, device="cpu", context=400, workers=1) as model:
        yield model


@pytest.fixture(scope="module")
def windowed() -> Iterator[strata.Model]:
    """Windows of 4 with prompt lookup, two workers, an eighth of the experts cached."""
    with strata.load(MODEL, device="cpu", context=400, workers=2, spec=4, expert_cache=96) as model:
        yield model


def ids(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events]


@pytest.mark.parametrize("prompt", [LISTS, CODE, QUESTION], ids=["list", "code", "chat"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}])
def test_windows_do_not_change_text(
    plain: strata.Model, windowed: strata.Model, prompt: object, sampling: dict[str, float]
) -> None:
    """C21: plain decoding is the reference; seeds are tied to positions."""
    expected = ids(list(plain.generate(prompt, max_tokens=32, **sampling)))
    answer = windowed.generate(prompt, max_tokens=32, **sampling)
    assert ids(list(answer)) == expected
    if prompt is LISTS and not sampling:
        assert answer.report.drafts.accepted > 0


def test_a_follow_up_equals_a_fresh_start(windowed: strata.Model, plain: strata.Model) -> None:
    """C22, C25: recurrent layers included; all of the visible history is reused."""
    first = windowed.prompt_tokens(LISTS)
    said = ids(list(windowed.generate(first, max_tokens=10)))
    follow_up = [*first, *said, *windowed.tokenizer.encode("\n- three")]
    answer = windowed.generate(follow_up, max_tokens=24)
    text = ids(list(answer))
    assert answer.report.reuse.reused_tokens == len(first) + len(said)
    plain.logits([1])  # drops what plain kept
    fresh = plain.generate(follow_up, max_tokens=24)
    assert text == ids(list(fresh)) and fresh.report.reuse.reused_tokens == 0


def test_generated_tokens_are_the_likeliest_by_logits(plain: strata.Model) -> None:
    tokens = plain.prompt_tokens(CODE)
    said = ids(list(plain.generate(tokens, max_tokens=12)))
    rows = plain.logits([*tokens, *said])
    assert rows.dtype == np.float32 and rows.shape == (len(tokens) + 12, plain.engine.n_vocab)
    assert rows[len(tokens) - 1 : -1].argmax(axis=1).tolist() == said


@pytest.mark.parametrize("window", [1, 4])
def test_logits_through_windows_equal_the_prompt_reader(plain: strata.Model, window: int) -> None:
    tokens = plain.prompt_tokens(LISTS)
    through = plain.logits(tokens, through="windows", window=window)
    assert compare(plain.logits(tokens), through).kl.max() <= 1e-9
    with pytest.raises(InputError, match='has no effect with through="prompt"'):
        plain.logits(tokens, window=8)


def test_text_is_the_decoded_tokens(plain: strata.Model) -> None:
    events = list(plain.generate(QUESTION, max_tokens=30))
    said = ids(events)
    if events[-1].finish == "stop":
        said = said[:-1]
    assert "".join(event.text for event in events) == plain.tokenizer.decode(said)


def test_limits_and_names_are_checked_before_any_work(plain: strata.Model) -> None:
    with pytest.raises(ContextLengthError, match=r"401 tokens .* 400"):
        plain.generate([5] * 401)
    with pytest.raises(SettingError, match="did you mean 'expert_cache'"):
        strata.load(MODEL, device="cpu", expert_cash=3)
    assert plain.settings.context == 400 and plain.settings.workers == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_cpu_is_only_used_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """C46."""
    assert cli.main(["run", str(MODEL), "hi"]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert cli.main(["run", str(MODEL), "hi", "--device", "cpu", "--max-tokens", "2"]) == 0
    assert "CPU only" in capsys.readouterr().err


def test_logpos_command_equals_logits(
    plain: strata.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.tsv"
    text.write_text(CODE)
    line = f"logpos {MODEL} --text {text} --out {out} --top 5 --window 3 --device cpu --workers 1"
    assert cli.main(line.split()) == 0
    tokens = plain.prompt_tokens(CODE)
    rows = plain.logits(tokens).astype(np.float64)
    logp = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    assert [int(fields[0]) for fields in lines] == list(range(len(tokens)))
    for t, fields in enumerate(lines):
        if t + 1 < len(tokens):
            assert int(fields[1]) == tokens[t + 1]
            assert float(fields[2]) == pytest.approx(logp[t, tokens[t + 1]], abs=1e-5)
        top = [(int(i), float(p)) for i, p in (item.split(":") for item in fields[8:])]
        assert [i for i, _ in top] == np.argsort(-logp[t], kind="stable")[:5].tolist()
        assert [p for _, p in top] == pytest.approx(logp[t, [i for i, _ in top]], abs=1e-5)


def test_plan_explain_and_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(MODEL), "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert cli.main(["plan", str(MODEL), "--device", "cpu", "--ram-gb", "0.01"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert cli.main(["explain", str(MODEL), "--device", "cpu", "--window", "2"]) == 0
    assert "wait_cpu" in capsys.readouterr().out
    assert cli.main(["inspect", str(MODEL), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {t["type"] for t in tensors} == {"Q8_0", "BF16", "F32"}


def test_interrupting_a_run_is_clean() -> None:
    """Ctrl-C once the answer is flowing: code 130 and no traceback."""
    command = [sys.executable, "-m", "strata.cli", "run", str(MODEL), "Once", "--raw"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--temperature", "2", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("STRATA_")},
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    assert err.decode().strip() == ""
