"""Words as the host sees them: plain aligned 32-bit loads and stores, which x86-64 and the mapping
keep in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD_BYTES = 64
RELEASED = 0x7FFFFFFF


def raise_word(words: npt.NDArray[np.uint32], index: int, value: int) -> None:
    """Set word ``index`` of a uint32 view with 16 entries a word; it may only grow."""
    at = index * WORD_BYTES // 4
    assert value >= int(words[at]), f"word {index} would fall from {int(words[at])} to {value}"
    words[at] = value


def read_word(words: npt.NDArray[np.uint32], index: int) -> int:
    """Value of word ``index``."""
    return int(words[index * WORD_BYTES // 4])


@dataclass(frozen=True)
class Payload:
    """What the host reads at a ring: rows of the CPU by expert, those on time and then the late.

    All int32: expert [G], start [G + 1], row and token [n]; counts: groups and rows on time, late
    groups and rows.
    """

    expert: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    counts: tuple[int, int, int, int]

    def part(self, late: bool) -> Payload:
        """The groups on time, or the late ones, counted from 0."""
        groups, rows, late_groups, late_rows = self.counts
        g0, r0 = (groups, rows) if late else (0, 0)
        g1, r1 = g0 + (late_groups if late else groups), r0 + (late_rows if late else rows)
        counts = (g1 - g0, r1 - r0, 0, 0)
        return Payload(
            self.expert[g0:g1],
            self.start[g0 : g1 + 1] - np.int32(r0),
            self.row[r0:r1],
            self.token[r0:r1],
            counts,
        )


def read_payload(ints: npt.NDArray[np.int32], n_rows: int) -> Payload:
    """The payload of a window of n_rows routed rows, copied out of the shared memory."""
    found = ints[: payload_ints(n_rows)].copy()
    first, second, third, fourth = (int(n) for n in found[:4])
    at = 4
    parts = []
    for size in (n_rows, n_rows + 1, n_rows, n_rows):
        parts.append(found[at : at + size])
        at += size
    n_groups, n = first + third, second + fourth
    expert, start, row, token = parts
    counts = (first, second, third, fourth)
    return Payload(expert[:n_groups], start[: n_groups + 1], row[:n], token[:n], counts)


def payload_ints(n_rows: int) -> int:
    """int32 numbers of a payload."""
    return 5 + 4 * n_rows
