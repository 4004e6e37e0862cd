"""--decode-timing: one line an answer, whose parts add up; without it nothing stands between."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import strata

PATH = Path(__file__).parent.parent / "fixtures" / "qwen3_moe" / "bf16.gguf"


def test_the_line_of_an_answer() -> None:
    """5 tokens: the first is the prompt's, and the last is read too: 5 windows of 1."""
    with strata.load(PATH, device="cpu", context=64, decode_timing=True) as model:
        answer = model.generate([3, 4, 5], max_tokens=5)
        list(answer)
        line = next(x for x in answer.report.lines() if x.startswith("decode timing"))
        spec = model.engine.spec.layers[0].ffn
        assert "5 windows, 1.00 tokens asked and 1.00 kept a window" in line
        total, verify, commit, draft = map(
            float,
            re.search(
                r"; ([\d.]+) ms.* verify ([\d.]+) \+ commit ([\d.]+) \+ draft ([\d.]+)", line
            ).groups(),  # type: ignore[union-attr]
        )
        assert total == pytest.approx(verify + commit + draft, abs=0.03) and verify > 0
        assert f"CPU rows {spec.n_active:.2f}, cached 0.00, PCIe 0.00" in line
        assert not any(x.startswith("decode timing") for x in answer.report.lines())


def test_off_means_nothing_in_between() -> None:
    with strata.load(PATH, device="cpu", context=64) as model:
        assert model.session.engine is model.engine
        answer = model.generate([3, 4, 5], max_tokens=3)
        list(answer)
        assert not any("decode timing" in x for x in answer.report.lines())
