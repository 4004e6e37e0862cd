"""What a table says of one arm: divergences from the reference by position, perplexity, p99.

Arrays per position go in, means by bucket come out; NumPy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.divergence import POSITION_BUCKETS, Array, kl, kl_top, log_softmax
from strata.core.errors import NumericsError

Rows = npt.NDArray[np.floating]
P99 = 99.0


@dataclass(frozen=True)
class Bucket:
    """Means over the positions of one bucket ("0-7", ..., "all"). kl: over the whole vocabulary,
    None where only stored lists were compared; kl_top: over 20 tokens and the rest; nats."""

    positions: str
    n: int
    kl_top: float
    kl: float | None
    top1: float
    perplexity: float | None
    p99: float
    """Of kl_top."""


@dataclass
class Scores:
    """Per position of all texts in order: the position in its text, KL(reference || arm), whether
    the likeliest token is the same, log p(next token) under the arm (NaN at a text's end)."""

    position: list[int] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_top: list[float] = field(default_factory=list)
    top1: list[bool] = field(default_factory=list)
    target: list[float] = field(default_factory=list)

    def add(self, position: int, reference_V: Array, arm_V: Array, target: int | None) -> None:
        """Score one position from log-probabilities [V]."""
        self.position.append(position)
        self.kl.append(kl(reference_V, arm_V))
        self.kl_top.append(kl_top(reference_V, arm_V))
        self.top1.append(bool(np.argmax(reference_V) == np.argmax(arm_V)))
        self.target.append(float("nan") if target is None else float(arm_V[target]))

    def buckets(self) -> list[Bucket]:
        """By position, then all; buckets without positions are left out."""
        at = np.asarray(self.position)
        found = []
        for first, last in POSITION_BUCKETS:
            inside = (at >= first) & (at <= (at.max() if last is None else last))
            name = f"{first}+" if last is None else f"{first}-{last}"
            if inside.any():
                found.append(self._bucket(name, inside))
        return [*found, self._bucket("all", np.ones(len(at), dtype=bool))]

    def _bucket(self, name: str, inside: npt.NDArray[np.bool_]) -> Bucket:
        top = np.asarray(self.kl_top)[inside]
        full = np.asarray(self.kl)[inside] if self.kl else None
        target = np.asarray(self.target)[inside]
        told = target[~np.isnan(target)]
        return Bucket(
            name,
            int(inside.sum()),
            float(top.mean()),
            None if full is None else float(full.mean()),
            float(np.asarray(self.top1)[inside].mean()),
            float(np.exp(-told.mean())) if len(told) else None,
            float(np.percentile(top, P99)),
        )


@dataclass(frozen=True)
class ArmResult:
    """One row of the table. rows: routed rows of windows by place; off: settings of the arm that
    have no effect here, and why; seconds: of the run, comparisons included."""

    name: str
    settings: Mapping[str, Any]
    buckets: tuple[Bucket, ...]
    rows: Mapping[str, int] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""

    @property
    def all(self) -> Bucket:
        """Over all positions."""
        return self.buckets[-1]

    def moved_share(self) -> float | None:
        """Late and skipped rows over all missed ones; None when none was missed."""
        moved = self.rows.get("CPU_LATE", 0) + self.rows.get("SKIPPED", 0)
        missed = moved + self.rows.get("CPU", 0) + self.rows.get("PCIE", 0)
        return moved / missed if missed else None


def checked_log_softmax(logits_V: Rows, position: int, arm: str, text: str) -> Array:
    """Log-probabilities [V]; NumericsError naming arm, text and position for what is no
    distribution."""
    try:
        return log_softmax(logits_V, position)
    except NumericsError as error:
        raise NumericsError(f"arm {arm}, {text}: {error}") from None
