"""What a window on a device begins with and leaves, without its layers: the launches between are
replaced by logits made here (in Triton's interpreter a whole window takes a minute).

Expectations: NumPy's argmax and isfinite of these logits; the numbers that were handed in.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.engine.scripted import Letters
from tests.engine.test_device_engine import on_device

from strata.core.errors import ContextLengthError, EngineError, NumericsError
from strata.core.settings import Settings
from strata.engine.draft import NoDrafter
from strata.engine.engine import Engine
from strata.engine.session import Session

FIXTURES = Path(__file__).parent.parent / "fixtures"
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="kernels are compiled here"
)


class Scripted:
    """An engine whose windows give these logits, and what each of them began with."""

    def __init__(self, family: str) -> None:
        given = {"context": 32} | ({} if family == "llama" else {"expert_cache": 3})
        self.engine: Engine = on_device(FIXTURES / family / "bf16.gguf", "cpu", **given)
        self.runner = self.engine.runner
        self.rng = np.random.default_rng(0)
        self.made: list[np.ndarray] = []
        self.began: list[tuple[int, list[int], list[int]]] = []
        self.spoil: dict[tuple[int, int], float] = {}
        """(row, token) of the next window -> logit."""
        self.brought = 0
        inner = self.runner.on_host

        def counted(logits: torch.Tensor) -> torch.Tensor:
            self.brought += 1
            return inner(logits)

        self.runner.on_host = counted  # type: ignore[method-assign]
        for n_tokens in range(1, 9):
            self._script(n_tokens)

    def _script(self, n_tokens: int) -> None:
        recorded = self.runner.window(n_tokens)
        (key,) = (k for k, kept in self.runner._windows.items() if kept is recorded)
        frame, choose = recorded.frame, recorded.program.steps[-1]
        assert choose.name == "choose"

        def run() -> None:
            recorded.staged.take()
            which = int(self.runner.state.which)
            self.began.append((which, frame.pos_T.tolist(), frame["ids"].tolist()))
            # few values, so that the highest is there several times
            rows = self.rng.integers(-5, 5, tuple(frame["logits"].shape)).astype(np.float32)
            for at, value in self.spoil.items():
                rows[at] = value
            self.made.append(rows)
            frame["logits"].copy_(torch.from_numpy(rows))
            choose.launch()
            recorded.staged.hand(None)

        self.runner._windows[key] = dataclasses.replace(recorded, run=run, finish=None)


@pytest.fixture(params=["llama", "qwen3_next"])
def scripted(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    made = Scripted(request.param)
    yield made
    made.engine.close()


def test_every_size_begins_where_the_text_is_and_gives_the_highest(scripted: Scripted) -> None:
    """Also which copy of recurrent state is read: each commit of some token turns it."""
    engine, turns, start = scripted.engine, 0, 0
    recurrent = len(scripted.runner.state.recurrent()) > 0
    for i, n_tokens in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 1)):
        tokens = [int(t) for t in scripted.rng.integers(8, 60, n_tokens)]
        output = engine.verify(tokens)
        expected = scripted.made[-1]
        assert [output.greedy(t) for t in range(n_tokens)] == expected.argmax(axis=1).tolist()
        assert scripted.brought == i
        assert np.array_equal(output.logits(), expected)
        positions = list(range(start, start + n_tokens))
        assert scripted.began[-1] == (turns % 2 if recurrent else 0, positions, tokens)
        keep = n_tokens if n_tokens % 3 else n_tokens // 3 - 1
        engine.commit(keep)
        start, turns = start + keep, turns + (keep > 0)
        assert engine.tokens[-keep:] == tokens[:keep] or keep == 0


def test_logits_end_with_the_next_window(scripted: Scripted) -> None:
    engine = scripted.engine
    first, again = engine.verify([9, 10]), engine.verify([9, 10])
    kept = again.logits()
    engine.commit(1)
    assert np.array_equal(again.row(0), scripted.made[1][0])
    engine.verify([11, 12])
    assert np.array_equal(again.logits(), scripted.made[1]) and again.logits() is kept
    assert first.greedy(1) == int(scripted.made[0][1].argmax())
    with pytest.raises(EngineError, match="are gone"):
        first.logits()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found_without_logits(
    scripted: Scripted, value: float
) -> None:
    """A draft behind them may be dropped; a commit of them names the position."""
    engine = scripted.engine
    engine.verify([9, 10])
    engine.commit(2)
    scripted.spoil = {(2, scripted.engine.n_vocab - 1): value}
    output = engine.verify([11, 12, 13, 14])
    assert [output.greedy(t) is None for t in range(4)] == [False, False, True, False]
    engine.commit(2)
    engine.verify([13, 14, 15, 16])
    with pytest.raises(NumericsError, match="after position 6 are not finite"):
        engine.commit(3)
    assert scripted.brought == 0
    with pytest.raises(EngineError, match="state is void"):
        engine.verify([9])
    engine.reset()
    scripted.spoil = {}
    assert engine.verify([9]).greedy(0) == int(scripted.made[-1][0].argmax())


def test_no_room_leaves_the_window_before_as_it_is(scripted: Scripted) -> None:
    engine = scripted.engine
    for _ in range(3):
        engine.verify([9] * 8)
        engine.commit(8)
    output = engine.verify([9] * 3)
    engine.commit(3)
    with pytest.raises(ContextLengthError):
        engine.verify([9] * 6)
    assert np.array_equal(output.logits(), scripted.made[-1])


def test_an_answer_reads_logits_once_at_its_end(scripted: Scripted) -> None:
    session = Session(scripted.engine, NoDrafter(), Letters, [63])
    settings = Settings(max_tokens=9, temperature=0)
    tokens = [e.token for e in session.answer([9, 10], settings)]
    # the prompt goes through windows; the last pick is committed through one more
    picks = [int(rows[-1].argmax()) for rows in scripted.made]
    assert len(tokens) == 9 and tokens == picks[: len(tokens)]
    assert scripted.brought == 1
