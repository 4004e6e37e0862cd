"""What a verify window gave: the greedy choice after each of its tokens, and the logits for whoever
needs them.

A device finds the choice itself, and its logits stay where they are until somebody asks. They can
be had until the engine runs again; then asking for them is an error, never another window's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from strata.core.errors import EngineError, NumericsError
from strata.window.choice import Choice

Logits = npt.NDArray[np.float32]


class WindowOutput:
    """Of a window of T tokens. bring: its logits float32 [T, V], called once at most; what it gives
    need only be valid until ``end``. choice: what is known without them."""

    def __init__(
        self, n_tokens: int, bring: Callable[[], Logits], choice: Choice | None = None
    ) -> None:
        self._n_tokens, self._bring, self._choice = n_tokens, bring, choice
        self._rows_TV: Logits | None = None
        self._kept_TV: Logits | None = None
        self._best: dict[int, int | None] = {}
        self._ended = False

    def __len__(self) -> int:
        """T."""
        return self._n_tokens

    def greedy(self, t: int) -> int | None:
        """Id of the highest logit after token t, of equal ones the lowest id; None when some logit
        is NaN or infinite."""
        if self._choice is not None:
            return self._choice.best_T[t] if self._choice.finite_T[t] else None
        if t not in self._best:
            row_V = self.row(t)
            best = int(row_V.argmax())
            # a NaN is NumPy's maximum, so that -inf alone is left to the minimum
            finite = math.isfinite(row_V[best]) and math.isfinite(row_V.min())
            self._best[t] = best if finite else None
        return self._best[t]

    def row(self, t: int) -> Logits:
        """Logits float32 [V] after token t, to be read before the engine runs again. EngineError
        when it has."""
        rows_TV = self._rows() if self._kept_TV is None else self._kept_TV
        row_V: Logits = rows_TV[t]
        return row_V

    def logits(self) -> Logits:
        """All of them, float32 [T, V], a copy that stays. EngineError when the engine has run since
        and nobody asked before."""
        if self._kept_TV is None:
            self._kept_TV = self._rows().copy()
        return self._kept_TV

    def require_finite(self, n: int, first_position: int) -> None:
        """NumericsError naming the first position among the first n whose logits hold NaN or
        infinity; first_position: that of token 0."""
        for t in range(min(n, self._n_tokens)):
            if self.greedy(t) is None:
                raise NumericsError(
                    f"the logits after position {first_position + t} are not finite; the request "
                    f"was stopped and its state dropped"
                )

    def end(self) -> None:
        """The engine runs again: what nobody has copied is gone."""
        self._ended, self._rows_TV = True, None

    def _rows(self) -> Logits:
        if self._ended:
            raise EngineError(
                "the logits of this window are gone: the engine has run since; read them before "
                "the next window or prompt"
            )
        if self._rows_TV is None:
            self._rows_TV = self._bring()
        return self._rows_TV


def output_of(rows_TV: Logits | Sequence[Logits]) -> WindowOutput:
    """An output that is there already and stays."""
    rows = np.asarray(rows_TV, dtype=np.float32)
    return WindowOutput(len(rows), lambda: rows)
