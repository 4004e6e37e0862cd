"""Writes what the model expected at each position: the upstream engine's STRATA_LOGPOS lines.

A line, tab separated: position, target id, log p(target), likeliest id, its log p, hit 0 or 1, log
p(extra), log p(target) with extra left out; then, for each of the top tokens, ``id:logprob``. Row t
is the distribution after token t; its target is the token at t + 1. Where something does not exist
(no next token, no extra) stand -1 and nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strata.core.closing import Closing
from strata.core.divergence import log_softmax
from strata.core.errors import InputError
from strata.core.settings import SETTINGS, Settings

NO_TOKEN = -1


class LogposWriter(Closing):
    """Appends lines to a file; an observer of sessions. Close it when done."""

    def __init__(self, path: Path, top: int = 0, extra: int = NO_TOKEN) -> None:
        self._top, self._extra = top, extra
        try:
            self._file = path.open("a", encoding="ascii")
        except OSError as error:
            raise InputError(f"cannot append to {path}: {error.strerror or error}") from None

    def __call__(
        self, position: int, logits_V: npt.NDArray[np.floating], target: int = NO_TOKEN
    ) -> None:
        """Write the line of one position; flushed at once, so that a crash loses none."""
        self._file.write(
            logpos_line(position, logits_V, target, top=self._top, extra=self._extra) + "\n"
        )
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def logpos_line(
    position: int,
    logits_V: npt.NDArray[np.floating],
    target: int = NO_TOKEN,
    *,
    top: int = 0,
    extra: int = NO_TOKEN,
) -> str:
    """The line of one position, without its end. NumericsError for a row that is no
    distribution.
    """
    logp_V = log_softmax(logits_V, position)
    best = int(np.argmax(logp_V))
    fields = [
        str(position),
        str(target),
        _nine(_at(logp_V, target)),
        str(best),
        _nine(logp_V[best]),
        str(int(best == target)),
        _nine(_at(logp_V, extra)),
        _nine(_without(logp_V, target, extra)),
    ]
    if top:
        ids = np.argsort(-logp_V, kind="stable")[:top]
        fields += [f"{token}:{logp_V[token]:.6f}" for token in ids.tolist()]
    return "\t".join(fields)


def extra_token(settings: Settings, eos_tokens: Sequence[int], n_vocab: int) -> int:
    """The extra token of these settings: the one asked for, else the first end token, else none."""
    if settings.logpos_extra == SETTINGS["logpos_extra"].auto:
        return eos_tokens[0] if eos_tokens else NO_TOKEN
    if settings.logpos_extra >= n_vocab:
        raise InputError(
            f"--logpos-extra {settings.logpos_extra} is outside the vocabulary of {n_vocab}"
        )
    return settings.logpos_extra


def _at(logp_V: npt.NDArray[np.float64], token: int) -> float:
    return float("nan") if token == NO_TOKEN else float(logp_V[token])


def _without(logp_V: npt.NDArray[np.float64], target: int, extra: int) -> float:
    """log p(target) when extra cannot come."""
    if NO_TOKEN in (target, extra) or target == extra:
        return float("nan")
    rest = np.delete(logp_V, extra)
    peak = rest.max()
    return float(logp_V[target] - peak - np.log(np.exp(rest - peak).sum()))


def _nine(value: float) -> str:
    return f"{value:.9f}"
