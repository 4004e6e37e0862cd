"""Picks a token from one row of logits. Knows no windows and no models.

A list of processors, built once, changes the row; what is left is drawn from or, at temperature 0,
its maximum taken. The pick is a pure function of (settings, row, tokens before it): the draw at a
position comes from a counter-based generator keyed by (seed, position), so text does not depend on
how it is cut into windows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from strata.core.errors import NumericsError, SettingError
from strata.core.settings import SETTINGS, Settings

Row = npt.NDArray[np.float64]
"""[V] logits; -inf marks a token that cannot be picked."""

_HEAD_TOKENS = 1024
"""top_p sorts only this many likeliest tokens when they hold enough; a whole vocabulary takes 10
ms.
"""


@dataclass(frozen=True)
class History:
    """All tokens before the position to fill; the first n_prompt of them are the prompt."""

    tokens: Sequence[int]
    n_prompt: int


Processor = Callable[[Row, History], None]
"""Changes a row in place."""


class Constraint(Protocol):
    """A form the answer must have. ``mask`` sees each row that is picked from, then ``accept`` the
    pick; rows of rejected drafts are never shown."""

    def plan(self, drafts: list[int]) -> list[int]:
        """A window with these drafts is about to run: those up to the first that may not come."""
        ...

    def mask(self, row_V: Row) -> None:
        """Set what may not follow to -inf, in place."""
        ...

    def accept(self, token: int) -> None:
        """The row's pick."""
        ...


class Sampler:
    """Picks tokens by the request settings; ``seed`` is the one in use, drawn when none was
    given.
    """

    def __init__(
        self, settings: Settings, n_vocab: int, constraint: Constraint | None = None
    ) -> None:
        self.processors = build_processors(settings, n_vocab)
        self._constraint = constraint
        self.greedy = settings.temperature == 0
        random = settings.seed == SETTINGS["seed"].auto
        self.seed = secrets.randbits(64) if random else settings.seed
        self.takes_highest = self.greedy and constraint is None and not self.processors
        """A pick is the highest logit: whoever knows that one need not read the others."""

    def plan(self, drafts: list[int]) -> list[int]:
        """The drafts that can be picked; a constraint works on their masks while they run."""
        return drafts if self._constraint is None else self._constraint.plan(drafts)

    def pick(self, logits_V: npt.NDArray[np.floating], history: History) -> int:
        """Token id for position len(history.tokens). NumericsError for NaN or infinity; equal
        logits give the lowest id."""
        position = len(history.tokens)
        row = require_finite(logits_V, position)
        if self._constraint is not None:
            self._constraint.mask(row)
        for processor in self.processors:
            processor(row, history)
        token = int(np.argmax(row)) if self.greedy else draw(row, uniform(self.seed, position))
        if self._constraint is not None:
            self._constraint.accept(token)
        return token


def build_processors(s: Settings, n_vocab: int) -> list[Processor]:
    """The processors in force, in order: bias, penalties, temperature, top-k, top-p, min-p."""
    chain: list[tuple[bool, Processor]] = [
        (bool(s.logit_bias), _bias(s.logit_bias, n_vocab)),
        (s.repeat_penalty != 1, _repeat_penalty(s.repeat_penalty)),
        (
            s.frequency_penalty != 0 or s.presence_penalty != 0,
            _count_penalties(s.frequency_penalty, s.presence_penalty),
        ),
    ]
    if s.temperature > 0:
        chain += [
            (s.temperature != 1, _temperature(s.temperature)),
            (0 < s.top_k < n_vocab, _top_k(s.top_k)),
            (s.top_p < 1, _top_p(s.top_p)),
            (s.min_p > 0, _min_p(s.min_p)),
        ]
    return [processor for active, processor in chain if active]


def require_finite(logits_V: npt.NDArray[np.floating], position: int) -> Row:
    """A float64 copy of the row; NumericsError naming the position if a value is not finite."""
    row = np.array(logits_V, dtype=np.float64)
    finite = np.isfinite(row)
    if not finite.all():
        token = int(np.argmin(finite))
        raise NumericsError(
            f"the logits for position {position} hold {row[token]} (token {token} and "
            f"{int(np.sum(~finite)) - 1} more); the answer cannot go on"
        )
    return row


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) of one position: Philox with key seed and the position in its counter."""
    generator = np.random.Philox(key=seed, counter=[0, position, 0, 0])
    return float(np.random.Generator(generator).random())


def draw(row: Row, u: float) -> int:
    """Token at quantile u of softmax(row), tokens in order of their ids."""
    cumulative_V = np.cumsum(_weights(row))
    token = int(np.searchsorted(cumulative_V, u * cumulative_V[-1], side="right"))
    if token == len(row):  # u * total was rounded up to total
        token = int(np.flatnonzero(row > -np.inf)[-1])
    return token


def _weights(row: Row) -> Row:
    """exp(row - max): probabilities up to their sum."""
    return np.asarray(np.exp(row - row.max()))


def _bias(biases: tuple[tuple[int, float], ...], n_vocab: int) -> Processor:
    ids = np.array([token for token, _ in biases], dtype=np.int64)
    added = np.array([bias for _, bias in biases], dtype=np.float64)
    if len(ids) and ids[-1] >= n_vocab:
        raise SettingError(f"--logit-bias: token {ids[-1]} is outside the vocabulary of {n_vocab}")

    def add(row: Row, history: History) -> None:
        row[ids] += added

    return add


def _repeat_penalty(penalty: float) -> Processor:
    def weaken(row: Row, history: History) -> None:
        ids = np.unique(np.asarray(history.tokens, dtype=np.int64))
        row[ids] = np.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)

    return weaken


def _count_penalties(frequency: float, presence: float) -> Processor:
    def subtract(row: Row, history: History) -> None:
        answer = np.asarray(history.tokens[history.n_prompt :], dtype=np.int64)
        ids, counts = np.unique(answer, return_counts=True)
        row[ids] -= frequency * counts + presence

    return subtract


def _temperature(temperature: float) -> Processor:
    def divide(row: Row, history: History) -> None:
        # the maximum becomes 0 first: tiny temperatures then give -inf, never inf - inf
        row -= row.max()
        with np.errstate(over="ignore"):
            row /= temperature

    return divide


def _top_k(k: int) -> Processor:
    def keep(row: Row, history: History) -> None:
        threshold = np.partition(row, len(row) - k)[len(row) - k]
        kept = row > threshold
        ties = np.flatnonzero(row == threshold)
        kept[ties[: k - int(kept.sum())]] = True
        row[~kept] = -np.inf

    return keep


def _top_p(p: float) -> Processor:
    def keep(row: Row, history: History) -> None:
        weight_V = _weights(row)
        need = p * weight_V.sum()
        ids = _likeliest(weight_V, need)
        enough = int(np.searchsorted(np.cumsum(weight_V[ids]), need)) + 1
        kept = np.zeros(len(row), dtype=bool)
        kept[ids[:enough]] = True
        row[~kept] = -np.inf

    return keep


def _likeliest(weight_V: Row, need: float) -> npt.NDArray[np.int64]:
    """Ids by falling weight, equal ones by rising id; perhaps only a head of them that weighs at
    least ``need``."""
    ids = np.arange(len(weight_V))
    if len(weight_V) > _HEAD_TOKENS:
        threshold = np.partition(weight_V, -_HEAD_TOKENS)[-_HEAD_TOKENS]
        head = np.flatnonzero(weight_V >= threshold)
        if weight_V[head].sum() > need:
            ids = head
    return np.asarray(ids[np.argsort(-weight_V[ids], kind="stable")])


def _min_p(share: float) -> Processor:
    def keep(row: Row, history: History) -> None:
        row[_weights(row) < share] = -np.inf

    return keep
