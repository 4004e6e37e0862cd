"""How far two sets of next-token distributions are apart: KL, top-1 agreement, by position. NumPy
only.

Convention of top-20 KL: over the reference's 20 likeliest tokens and one bucket for all the rest.
Everything is float64, nats, one row at a time (a row of 150,000 tokens is 1.2 MB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.core.errors import InputError, NumericsError

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.floating]

POSITION_BUCKETS: tuple[tuple[int, int | None], ...] = ((0, 7), (8, 63), (64, 639), (640, None))
"""First and last position of each bucket in reports."""

_SMALLEST_REST = 2.0**-52
"""1 minus a sum of probabilities cannot tell less than this from nothing."""


_NEAR = 10.0
"""Nats below the best logit within which the top of a text's distribution is looked for first."""


@dataclass(frozen=True)
class Vocabulary:
    """What logits are indexed by. fingerprint: of the tokenizer, or "" when unknown."""

    name: str
    n_vocab: int
    fingerprint: str = ""


@dataclass(frozen=True)
class Bucket:
    """Means over the positions of one bucket; positions "640+" or "all"."""

    positions: str
    n: int
    kl: float
    kl_top: float
    top1: float


@dataclass(frozen=True)
class Divergence:
    """Per position: KL(reference || other) in nats, over everything and over top-k and rest, and
    whether the likeliest token is the same."""

    positions: npt.NDArray[np.int64]
    kl: Array
    kl_top: Array
    top1: npt.NDArray[np.bool_]

    def buckets(self) -> list[Bucket]:
        """Means by position, buckets without positions left out, and over all of them."""
        chosen = []
        for first, last in POSITION_BUCKETS:
            inside = self.positions >= first
            if last is not None:
                inside &= self.positions <= last
            chosen.append((f"{first}+" if last is None else f"{first}-{last}", inside))
        chosen.append(("all", np.ones(len(self.positions), dtype=bool)))
        return [self._bucket(name, inside) for name, inside in chosen if inside.any()]

    def lines(self) -> list[str]:
        """Printable table."""
        head = f"{'positions':<10} {'n':>7} {'KL':>12} {'KL top':>12} {'top-1':>8}"
        return [head] + [
            f"{b.positions:<10} {b.n:>7} {b.kl:>12.6f} {b.kl_top:>12.6f} {100 * b.top1:>7.2f}%"
            for b in self.buckets()
        ]

    def _bucket(self, name: str, inside: npt.NDArray[np.bool_]) -> Bucket:
        means = (float(np.mean(x[inside])) for x in (self.kl, self.kl_top, self.top1))
        return Bucket(name, int(inside.sum()), *means)


def require_same_vocabulary(reference: Vocabulary, other: Vocabulary) -> None:
    """InputError naming both when the two do not speak of the same tokens."""
    differ = reference.n_vocab != other.n_vocab or (
        reference.fingerprint and other.fingerprint and reference.fingerprint != other.fingerprint
    )
    if differ:
        raise InputError(
            f"cannot compare: {reference.name} has {reference.n_vocab} tokens (tokenizer "
            f"{reference.fingerprint or 'unknown'}), {other.name} has {other.n_vocab} (tokenizer "
            f"{other.fingerprint or 'unknown'}); both must come from the same tokenizer"
        )


def log_softmax(logits_V: Rows, position: int = 0, name: str = "logits") -> Array:
    """Log-probabilities [V] of one row. -inf (a token that cannot come) stays -inf; NaN, +inf or a
    row of nothing but -inf is a NumericsError naming the position."""
    row = np.asarray(logits_V, dtype=np.float64)
    if np.isnan(row).any() or np.isposinf(row).any() or not np.isfinite(row).any():
        raise NumericsError(
            f"{name}: position {position} holds NaN, infinity or no possible token; "
            f"no distribution can be compared there"
        )
    row = row - row.max()
    return np.asarray(row - np.log(np.exp(row).sum()))


def kl(reference_V: Array, other_V: Array) -> float:
    """KL(reference || other) of two log-probability rows [V]; inf where other rules out a token
    that the reference may bring. Tokens that the reference rules out count nothing."""
    possible = reference_V > -np.inf
    p, q = reference_V[possible], other_V[possible]
    return max(float(np.sum(np.exp(p) * (p - q))), 0.0)


def kl_top(reference_V: Array, other_V: Array, k: int = 20) -> float:
    """KL over the reference's k likeliest tokens and one bucket for the rest; 0 rows of rest add
    nothing."""
    if len(reference_V) <= k:
        return kl(reference_V, other_V)
    top = np.argpartition(-reference_V, k - 1)[:k]
    return kl_top_lists(reference_V[top], other_V[top])


def kl_top_lists(reference_K: Array, other_K: Array) -> float:
    """The same from the log-probabilities [k] of the reference's top tokens in both, as stored
    lists give them; the rest is what their sums leave of 1."""
    possible = reference_K > -np.inf
    p, q = reference_K[possible], other_K[possible]
    total = float(np.sum(np.exp(p) * (p - q)))
    rest_p, rest_q = (1 - float(np.exp(x).sum()) for x in (p, q))
    if rest_p > _SMALLEST_REST:
        total += rest_p * float(np.log(rest_p / max(rest_q, _SMALLEST_REST)))
    return max(total, 0.0)


def kl_top_logits(reference_V: Rows, other_V: Rows, k: int = 20) -> float:
    """``kl_top`` of two rows of finite or -inf float32 logits, quickly: exponentials in float32,
    their sums in float64 (1e-7 of a nat)."""
    n = len(reference_V)
    if n <= k:
        return kl(log_softmax(reference_V), log_softmax(other_V))
    # few tokens are near the best one, and the top k are among them when there are k
    near = np.flatnonzero(reference_V > reference_V.max() - _NEAR)
    among = near if len(near) >= k else np.arange(n)
    top = among[np.argpartition(reference_V[among], len(among) - k)[len(among) - k :]]
    p, q = (row[top].astype(np.float64) - _log_sum(row) for row in (reference_V, other_V))
    return kl_top_lists(p, q)


def _log_sum(row: Rows) -> float:
    peak = row.max()
    return float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))


def compare(
    reference_TV: Rows,
    other_TV: Rows,
    *,
    positions: Sequence[int] | None = None,
    names: tuple[str, str] = ("reference", "other"),
    k: int = 20,
) -> Divergence:
    """Compare logits (or log-probabilities) [T, V] row by row. InputError naming both for other
    shapes, NumericsError naming the position for NaN in either."""
    for name, rows in zip(names, (reference_TV, other_TV), strict=True):
        if rows.ndim != 2 or len(rows) == 0:
            raise InputError(f"{name} has shape {rows.shape}; rows [T, V] are needed")
    vocabularies = (
        Vocabulary(name, rows.shape[1])
        for name, rows in zip(names, (reference_TV, other_TV), strict=True)
    )
    require_same_vocabulary(*vocabularies)
    if len(reference_TV) != len(other_TV):
        raise InputError(
            f"{names[0]} has {len(reference_TV)} positions, {names[1]} has {len(other_TV)}; "
            f"both must come from the same text"
        )
    at = np.arange(len(reference_TV)) if positions is None else np.asarray(positions)
    full, top = np.empty(len(at)), np.empty(len(at))
    same = np.empty(len(at), dtype=bool)
    for t, position in enumerate(at.tolist()):
        p = log_softmax(reference_TV[t], position, names[0])
        q = log_softmax(other_TV[t], position, names[1])
        full[t], top[t] = kl(p, q), kl_top(p, q, k)
        same[t] = np.argmax(p) == np.argmax(q)
    return Divergence(at.astype(np.int64), full, top, same)
