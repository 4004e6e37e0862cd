"""Rows by place of a device's windows. Expectation: NumPy's counts of all windows at once."""

from __future__ import annotations

import numpy as np

from strata.core.types import Place
from strata.experts.device_counters import COUNTED_AT_ONCE, DeviceCounters


def test_windows_of_several_sizes() -> None:
    """More windows than are counted at once; -1 is no row; buffers are overwritten afterwards."""
    rng, counters, seen = np.random.default_rng(0), DeviceCounters(3), []
    buffer = np.empty((3, 8), np.int8)
    for i in range(COUNTED_AT_ONCE + 5):
        n_rows = 1 + i % 8
        buffer[:] = rng.integers(-1, len(Place), buffer.shape)
        seen.append(buffer[:, :n_rows].copy())
        counters.add(buffer[:, :n_rows])
        if i % 30 == 7:
            whole = np.concatenate(seen, axis=1)
            assert {place: counters.total(place) for place in Place} == {
                place: int((whole == place).sum()) for place in Place
            }
    whole = np.concatenate(seen, axis=1)
    expected = [[(row == place).sum() for place in Place] for row in whole]
    assert counters.rows.tolist() == np.array(expected).tolist()
    assert counters.rows_LP[1, Place.FAST] == expected[1][Place.FAST]
    skipped = int((whole == Place.SKIPPED).sum())
    assert counters.lines() == [f"route tail skip: {skipped} entries skipped since the start"]
    counters.clear()
    assert counters.lines() == [] and counters.rows_LP == {}
