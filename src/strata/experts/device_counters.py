"""Where the routed rows of a device's windows were computed, counted on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.core.types import Place

COUNTED_AT_ONCE = 64
"""Windows."""


class DeviceCounters:
    """Routed rows by layer and place since the start.

    Windows are put aside and counted many at once, or when somebody looks: this stands between two
    windows.
    """

    def __init__(self, n_layers: int) -> None:
        self._rows = np.zeros((n_layers, len(Place)), np.int64)
        self._aside: list[npt.NDArray[np.int8]] = []

    def add(self, place_LR: npt.NDArray[np.int8]) -> None:
        """Count one window; -1 stands for no row."""
        self._aside.append(place_LR.copy())
        if len(self._aside) == COUNTED_AT_ONCE:
            self._count()

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """[L, places]"""
        self._count()
        return self._rows

    def _count(self) -> None:
        if self._aside:
            place_LN = np.concatenate(self._aside, axis=1)
            self._aside.clear()
            for place in range(self._rows.shape[1]):
                self._rows[:, place] += np.count_nonzero(place_LN == place, axis=1)

    @property
    def rows_LP(self) -> dict[tuple[int, Place], int]:
        """By (layer, place), only what is not zero."""
        at = zip(*np.nonzero(self.rows), strict=True)
        return {(int(i), Place(int(p))): int(self.rows[i, p]) for i, p in at}

    def total(self, place: Place) -> int:
        """Rows at a place over all layers."""
        return int(self.rows[:, place].sum())

    def lines(self) -> list[str]:
        """What was left out since the start, for people; which rows shared an expert is not
        known."""
        rows = self.total(Place.SKIPPED)
        return [f"route tail skip: {rows} entries skipped since the start"] if rows else []

    def clear(self) -> None:
        """Count from zero."""
        self._aside.clear()
        self._rows[:] = 0
