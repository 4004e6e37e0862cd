"""The live meter and the re-read: nothing of them is left in the text, and what they report equals
comparisons made by hand from models loaded for it."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.core.divergence import compare, kl_top_logits
from strata.core.errors import SettingError
from strata.core.settings import Settings
from strata.engine.model import Model
from strata.engine.quality_meter import MeteredEngine

FIXTURES = Path(__file__).parent.parent / "fixtures"
FIXTURE = FIXTURES / "qwen4_exp" / "bf16.gguf"
PROMPT = [9, 10, 11, 12, 9, 10, 11, 12, 9, 10]
LOADED = {"device": "cpu", "workers": 1, "context": 96}


def opened(**settings: object) -> Model:
    return strata.load(FIXTURE, **{**LOADED, **settings})


def text_of(model: Model, n: int = 24) -> list[int]:
    return [e.token for e in model.generate(PROMPT, max_tokens=n, logit_bias={7: -1e6})]


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("defer", ["1", "repair"])
def test_the_text_and_the_state_are_as_without(family: str, defer: str) -> None:
    """Windows of 3 with right and wrong drafts, every second one metered: the same tokens, and the
    same bits in the next window."""
    rows, texts = [], []
    for meter in ("0", "1/2"):
        with strata.load(
            FIXTURES / family / "bf16.gguf", spec=3, defer_cpu=defer, quality_meter=meter, **LOADED
        ) as model:
            texts.append(text_of(model, 14))
            engine = model.engine
            rows.append(engine.run_window([20, 21]))
            engine.commit(1)
            rows.append(engine.run_window([22]))
    assert texts[0] == texts[1]
    assert all(np.array_equal(a, b) for a, b in zip(rows[:2], rows[2:], strict=True))


def test_conditional_kl_is_that_of_the_window_alone() -> None:
    """Every third window: its rows against an exact window from the same deferred state, by hand;
    and that is not what the state adds up to."""
    with opened(defer_cpu="1", quality_meter="1/3") as model:
        tokens = text_of(model, 20)
        meter = model.meter
        assert meter is not None and (meter.n_metered, meter.conditional.n) == (7, 7)
        facts, (line,) = meter.facts(), meter.lines()
    text = [*PROMPT, *tokens]
    lossy, exact = [], []
    with opened(defer_cpu="1") as model:
        engine = model.engine
        engine.read_prompt(PROMPT)
        for i, token in enumerate(text[len(PROMPT) : -1]):
            if i % 3 == 0:
                back = engine.select("exact")
                exact.append(engine.run_window([token])[0])
                back()
            row = engine.run_window([token])[0]
            engine.commit(1)
            if i % 3 == 0:
                lossy.append(row)
    by_hand = compare(np.stack(exact), np.stack(lossy))
    assert facts["conditional_positions"] == 7
    assert facts["conditional_kl"] == pytest.approx(by_hand.kl_top.mean(), rel=1e-5)
    assert facts["conditional_top1"] == by_hand.top1.mean()
    assert "not the state's" in line and "7 of 20 windows" in line


def test_cumulative_kl_is_that_of_the_whole_answer() -> None:
    """Against an exact reading of prompt and answer; the sequence goes on untouched."""
    with opened(defer_cpu="1", quality_reread=True) as model:
        tokens = text_of(model, 20)
        kept = model.engine.tokens
        model.read_again()
        assert model.engine.tokens == kept
        assert model.meter is not None
        facts, line = model.meter.facts(), model.counter_lines()[-1]
        more = [e.token for e in model.generate([*PROMPT, *tokens, 30], max_tokens=5)]
    text = [*PROMPT, *tokens]
    with opened() as model:
        exact = model.logits(text[: len(kept)])[len(PROMPT) :]
    with opened(defer_cpu="1") as model:
        model.engine.read_prompt(PROMPT)
        lossy = []
        for token in kept[len(PROMPT) :]:
            lossy.append(model.engine.run_window([token])[0])
            model.engine.commit(1)
        assert text_of(model, 20) == tokens
        assert [e.token for e in model.generate([*PROMPT, *tokens, 30], max_tokens=5)] == more
    by_hand = compare(exact, np.stack(lossy))
    assert facts["cumulative_positions"] == len(kept) - len(PROMPT) == 20
    assert facts["cumulative_kl"] == pytest.approx(by_hand.kl_top.mean(), rel=1e-3)
    assert facts["cumulative_top1"] == by_hand.top1.mean()
    assert line.startswith("quality re-read: cumulative KL")


def test_a_new_prompt_ends_a_re_read() -> None:
    """Steps are small; what was not read again when the next request came is left out."""
    with opened(defer_cpu="1", quality_reread=True) as model:
        meter = model.meter
        assert meter is not None and not meter.idle()
        text_of(model, 60)
        assert meter.idle() and meter.idle()
        read = meter.cumulative.n
        assert 0 < read < 60
        model.logits([5, 6, 7])
        text_of(model, 2)
        meter.begin()
        assert not meter.idle() and meter.cumulative.n == read


def test_off_is_off() -> None:
    """Nothing stands between session and engine; exact windows are never metered."""
    with opened(defer_cpu="1") as model:
        assert model.meter is None and model.session.engine is model.engine
        assert model.counter_lines() == []
        model.read_again()
    with opened(quality_meter="1/1", quality_reread=True) as model:
        assert isinstance(model.session.engine, MeteredEngine)
        text_of(model, 6)
        model.read_again()
        assert model.meter is not None and model.meter.n_metered == model.meter.cumulative.n == 0


def test_own_time_is_small() -> None:
    """What the meter does beside the exact windows, of the time of decoding: at most 1 %."""
    with opened(defer_cpu="1", quality_meter="1/16") as model:
        began = time.perf_counter()
        text_of(model, 64)
        spent = time.perf_counter() - began
        assert model.meter is not None and model.meter.n_metered == 4
        assert model.meter.own_s <= 0.01 * (spent - model.meter.rerun_s)


@pytest.mark.parametrize(
    ("given", "share"), [("1/64", 64), ("0", 0), (0, 0), ("0.5", 2), ("1", 1), (Fraction(1, 8), 8)]
)
def test_shares(given: object, share: int) -> None:
    found = Settings(quality_meter=given).quality_meter
    assert (found.denominator if found else 0) == share


@pytest.mark.parametrize("given", ["2/3", "-1/4", "64", "x", "1/0", True, 0.3])
def test_what_is_no_share(given: object) -> None:
    with pytest.raises(SettingError, match="must be 0 or 1/N"):
        Settings(quality_meter=given)


def test_quick_kl_equals_the_careful_one() -> None:
    """Rows of 150,000 tokens, one peaked, some suppressed; and with itself 0."""
    a, b = (np.random.default_rng(i).normal(size=(3, 150_000)).astype(np.float32) for i in (0, 1))
    a[1, 5] = b[1, 5] = 60
    a[2, 1000:2000] = b[2, 1000:2000] = -np.inf
    wanted = compare(a, b).kl_top
    for row in range(3):
        assert kl_top_logits(a[row], b[row]) == pytest.approx(wanted[row], abs=2e-6)
        assert kl_top_logits(a[row], a[row]) == 0
    assert kl_top_logits(a[0, :10], b[0, :10]) == pytest.approx(compare(a[:1, :10], b[:1, :10]).kl)
