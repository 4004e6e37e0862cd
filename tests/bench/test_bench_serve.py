"""The load generator against a scripted server; percentiles by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata import cli
from strata.bench import serve as module
from strata.bench.serve import Load, Outcome, arrivals, percentile, prompt, report, run
from strata.core.errors import InputError
from tests.serve.web.site import Script, serving


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert percentile([7.0], 99) == 7.0 and percentile([], 50) is None


def test_arrivals_keep_the_rate_and_prompts_differ() -> None:
    load = Load("http://x", rate=50, requests=4000)
    due = arrivals(load)
    assert due == arrivals(load) and due[0] == 0
    assert 4000 / due[-1] == pytest.approx(50, rel=0.1)
    assert len({prompt(load, n) for n in range(20)}) == 20


def test_report_counts_only_good_requests_in_times() -> None:
    good = Outcome(first_s=0.5, last_s=1.5, tokens=11, finish="stop")
    found = report(Load("http://x", requests=3), [good, Outcome("http 503"), Outcome("timeout")], 2)
    assert found["outcomes"] == {"ok": 1, "http 503": 1, "timeout": 1}
    assert found["first_token_ms"]["p50"] == 500 and found["token_ms"]["p99"] == pytest.approx(100)
    assert found["tokens_s"] == 5.5


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted site lists no models; name one instead."""

    async def named(client: object) -> str:
        return "tiny"

    monkeypatch.setattr(module, "_model", named)


def test_load_on_a_server(models: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    out = tmp_path / "found.json"
    with serving(script) as address:
        code = cli.main(
            ["bench", "serve", address, "--rate", "200", "--requests", "12", "--json", str(out)]
        )
    found = json.loads(out.read_text())
    assert code == 0 and found["outcomes"] == {"ok": 12} and found["finishes"] == {"stop": 12}
    assert found["tokens"] == 24 and found["prompt_tokens"] == 108 and found["reused_tokens"] == 48
    assert 0 < found["first_token_ms"]["p50"] <= found["first_token_ms"]["p99"]
    assert len({json.dumps(body["messages"]) for body in script.asked}) == 12
    assert "12 ok" in capsys.readouterr().out


def test_failures_are_counted_by_kind(
    models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = iter(["refuse", "slow", "slow", "fine", "slow", "fine"])
    monkeypatch.setattr(module, "prompt", lambda load, n: next(words))
    with serving(Script()) as address:
        found = run(Load(address, rate=1000, requests=4, timeout_s=0.8))
        assert found["outcomes"] == {"timeout": 2, "http 400": 1, "ok": 1}
        assert run(Load(address, requests=1, abort_share=1.0))["outcomes"] == {"aborted": 1}
    assert run(Load(address, requests=1))["outcomes"] == {"connect": 1}


def test_bad_flags_and_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--rate", "0"], ["--abort-share", "2"], ["--requests", "0"]):
        assert cli.main(["bench", "serve", "http://127.0.0.1:9", *flags]) == 2
    assert cli.main(["bench", "serve", "127.0.0.1:9"]) == 2
    with pytest.raises(InputError, match="no model answers there"):
        run(Load("http://127.0.0.1:9"))
