"""Outputs of windows: the greedy choice against NumPy's, logits only when asked for, and never
those of another window.

Expectations: NumPy's argmax and isfinite; the engine's own copies of the same windows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.engine.scripted import EOS, PROMPT, Letters, ScriptedEngine

import strata
from strata.core.errors import ContextLengthError, EngineError, NumericsError
from strata.core.settings import Settings
from strata.engine.draft import ScriptedDrafter
from strata.engine.session import Session
from strata.engine.window_output import WindowOutput, output_of
from strata.window.choice import Choice

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "bf16.gguf"
LOADED = {"device": "cpu", "workers": 1, "context": 64}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "best"),
    [
        ([1, 3, 3, 2], 1),
        ([-0.0, 0.0, -1, 0.0], 0),
        ([5], 0),
        ([NAN, 1, 2], None),
        ([1, 2, NAN], None),
        ([1, INF, 2], None),
        ([1, -INF, 2], None),
    ],
)
def test_greedy(row: list[float], best: int | None) -> None:
    assert output_of([np.zeros(len(row), np.float32), np.array(row)]).greedy(1) == best


def test_logits_are_brought_once_and_end() -> None:
    """The buffer that they lie in is overwritten; a copy is not."""
    buffer, brought = np.arange(6, dtype=np.float32).reshape(2, 3), []

    def bring() -> np.ndarray:
        brought.append(1)
        return buffer

    first, second = (WindowOutput(2, bring, Choice([2, 2], [True, False])) for _ in range(2))
    assert (len(first), first.greedy(0), first.greedy(1), brought) == (2, 2, None, [])
    with pytest.raises(NumericsError, match="after position 8 are not finite"):
        first.require_finite(2, 7)
    first.require_finite(1, 7)
    assert not brought
    kept = first.logits()
    assert first.row(1).tolist() == [3, 4, 5] and len(brought) == 1
    buffer[:] = 9
    for output in (first, second):
        output.end()
    assert kept.tolist() == first.logits().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.greedy(0) == 2
    with pytest.raises(EngineError, match="the logits of this window are gone"):
        second.row(0)
    with pytest.raises(EngineError, match="the logits of this window are gone"):
        second.logits()


@pytest.mark.parametrize("what", ["window", "prompt", "logits", "score"])
def test_an_engine_ends_the_window_before(what: str) -> None:
    with strata.load(FIXTURE, **LOADED) as model:
        engine = model.engine
        output = engine.verify([9, 10, 11])
        best = [output.greedy(t) for t in range(3)]
        kept = engine.run_window([9, 10, 11])
        assert best == np.argmax(kept, axis=1).tolist()
        output = engine.verify([9, 10, 11])
        engine.commit(2)
        with pytest.raises(ContextLengthError):  # refused before anything runs
            engine.read_prompt([9] * 63)
        assert np.array_equal(output.row(1), kept[1])
        {
            "window": lambda: engine.verify([12]),
            "prompt": lambda: engine.read_prompt([12]),
            "logits": lambda: engine.logits([12]),
            "score": lambda: engine.score([12], lambda start, rows: None),
        }[what]()
        with pytest.raises(EngineError, match="are gone"):
            output.row(1)


class Lazy(ScriptedEngine):
    """Makes the choice itself and counts who asks for logits."""

    asked = 0

    def verify(self, tokens: list[int]) -> WindowOutput:
        rows = super().verify(tokens).logits()
        finite = np.isfinite(rows).all(axis=1).tolist()

        def bring() -> np.ndarray:
            self.asked += 1
            return rows

        return WindowOutput(len(rows), bring, Choice(np.argmax(rows, axis=1).tolist(), finite))


def text(engine: ScriptedEngine, window: int = 3, n: int = 12, **sampling: object) -> list[int]:
    session = Session(engine, ScriptedDrafter(()), Letters, [EOS], window=window)
    settings = Settings(**({"max_tokens": n, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return [event.token for event in session.answer(PROMPT, settings)]


def test_greedy_windows_leave_logits_alone() -> None:
    """Only those after the last token are read, once, for a prompt that goes on from there."""
    lazy = Lazy()
    assert text(lazy) == text(ScriptedEngine())
    assert len(lazy.sizes) > 5 and lazy.asked == 1


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0, "seed": 3}, {"logit_bias": ((7, 2.0),)}, {"repeat_penalty": 1.3}],
)
def test_whoever_needs_logits_gets_them(sampling: dict[str, object]) -> None:
    lazy = Lazy()
    assert text(lazy, **sampling) == text(ScriptedEngine(), **sampling)
    assert lazy.asked >= len(lazy.sizes)


def test_observers_get_the_rows() -> None:
    seen: list[tuple[int, int]] = []
    picked: list[int] = []
    lazy = Lazy()
    session = Session(
        lazy, ScriptedDrafter(()), Letters, [EOS],
        observer=lambda position, row, token: seen.append((int(np.argmax(row)), token)),
    )  # fmt: skip
    settings = Settings(max_tokens=5, temperature=0)
    for _ in session.answer(
        PROMPT, settings, picked=lambda row, token: picked.append(int(np.argmax(row)) - token)
    ):
        pass
    assert len(seen) == 4 and all(best == token for best, token in seen)
    assert picked == [0] * 5


def test_the_row_after_an_answer_is_kept() -> None:
    """The same text again needs no reading, and is gone on from alike."""
    lazy = Lazy()
    session = Session(lazy, ScriptedDrafter(()), Letters, [EOS])
    first = [e.token for e in session.answer(PROMPT, Settings(max_tokens=4, temperature=0))]
    whole = PROMPT + first
    again = [e.token for e in session.answer(whole, Settings(max_tokens=3, temperature=0))]
    assert again == text(ScriptedEngine(), n=7)[4:]
    assert lazy.n_read == [len(PROMPT)]


def test_nan_in_a_row_that_is_taken_stops_the_answer() -> None:
    """The sampler's own words, whoever made the choice."""

    def row(tokens: list[int]) -> np.ndarray:
        out = np.zeros(40, np.float32)
        out[3] = NAN if len(tokens) == len(PROMPT) + 2 else 1
        return out

    for engine in (Lazy(row), ScriptedEngine(row)):
        with pytest.raises(NumericsError, match=r"position 7 hold nan \(token 3 and 0 more\)"):
            text(engine, window=1)
