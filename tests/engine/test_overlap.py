"""A request chooses how windows run: the variant, the state it may reuse, and what the report says.

Expectations: answers of engines that were loaded in the chosen mode; the rest by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.core.errors import SettingError
from strata.engine.model import Model

PATH = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "bf16.gguf"
PROMPT = [20, 31, 42, 53]
N = 24


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """Loaded with repair and all rows late."""
    with strata.load(PATH, device="cpu", workers=1, defer_cpu="repair") as loaded:
        yield loaded


def text(model: Model, prompt: list[int] = PROMPT, **more: object) -> list[int]:
    asked = {"max_tokens": N, "temperature": 2, "seed": 5} | more
    return [event.token for event in model.generate(prompt, **asked)]


def alone(**settings: object) -> list[int]:
    """The answer of an engine that knows nothing else."""
    with strata.load(PATH, device="cpu", workers=1, **settings) as other:
        return text(other)


def test_each_choice_answers_like_an_engine_loaded_that_way(model: Model) -> None:
    wanted = {
        "exact": alone(),
        "fast": alone(defer_cpu="repair"),
        "balanced": alone(defer_cpu="repair", defer_cpu_below=1 / 3),
    }
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3, "the modes differ here"
    for overlap in ("fast", "exact", "balanced", "exact", "fast"):
        model._session.forget()
        assert text(model, overlap=overlap) == wanted[overlap]
    model._session.forget()
    assert text(model) == wanted["fast"], "auto is what was loaded"


def test_windows_are_recorded_once_for_each_choice(model: Model) -> None:
    for overlap in ("exact", "balanced", "fast"):
        text(model, overlap=overlap, max_tokens=2)
    runner = model.engine.runner
    before = dict(runner._windows)
    for overlap in ("balanced", "exact", "fast", "auto"):
        text(model, overlap=overlap, max_tokens=2)
    assert runner._windows == before
    assert runner.variant.name == "repair", "a choice ends with its answer"


def test_an_exact_request_reuses_exact_state_only(model: Model) -> None:
    model._session.forget()
    first = model.generate(PROMPT, max_tokens=N, overlap="fast")
    tokens = [*PROMPT, *(event.token for event in first)]
    assert first.report.mode == "repair"
    assert any("windows: repair (changes the output)" in line for line in first.report.lines())
    again = model.generate([*tokens, 77], max_tokens=2, overlap="exact")
    events = [event.token for event in again]
    assert again.report.reuse.reused_tokens == 0 and again.report.mode == "exact"
    with strata.load(PATH, device="cpu", workers=1) as exact:
        assert [e.token for e in exact.generate([*tokens, 77], max_tokens=2)] == events
    # and the other way round: exact state serves everyone, inexact state is reported
    third = model.generate([*tokens, 77, *events, 5], max_tokens=2, overlap="fast")
    tail = [event.token for event in third]
    assert third.report.reuse.reused_tokens >= len(tokens)
    assert third.report.reuse.inexact_tokens == 0
    fourth = model.generate([*tokens, 77, *events, 5, *tail, 6], max_tokens=1)
    list(fourth)
    assert fourth.report.reuse.inexact_tokens > 0


def test_a_broken_off_answer_gives_its_choice_back(model: Model) -> None:
    answer = model.generate(PROMPT, max_tokens=N, overlap="exact")
    next(answer)
    next(answer)
    answer.close()
    assert model.engine.mode == "repair"


def test_what_the_engine_cannot_do_is_refused_before_any_work() -> None:
    with strata.load(PATH, device="cpu", workers=1) as exact:
        with pytest.raises(SettingError, match="--overlap fast needs --defer-cpu 1 or repair"):
            exact.generate(PROMPT, overlap="fast")
        with pytest.raises(SettingError, match="must be one of auto, exact, balanced, fast"):
            exact.generate(PROMPT, overlap="slow")
        assert text(exact, overlap="exact") == text(exact)
        assert np.array_equal(exact.logits(PROMPT), exact.logits(PROMPT))
