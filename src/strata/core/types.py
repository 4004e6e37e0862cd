"""The shared nouns, and the shape legend of the whole project. Knows no torch.

Shape legend (suffix letters of tensor names: ``x_TD`` is [tokens, hidden]):
    T  window tokens           K  experts per token      R = T*K routed rows (row r: token r // K,
    rank r % K)
    D  hidden width            C  residual streams       F  expert width
    E  experts of a layer      L  layers                 S  fast-tier slots
    H  heads                   V  vocabulary             G  groups (distinct experts of one window
    and layer)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Place(IntEnum):
    """Where one routed row is computed. Every routed row has exactly one place."""

    FAST = 0
    """Expert cached in the fast tier (VRAM; an ordinary buffer without a GPU)."""
    PCIE = 1
    """Read by the GPU straight from RAM."""
    CPU = 2
    """Computed by the CPU pool in place, needed in its own layer."""
    CPU_LATE = 3
    """Computed by the CPU pool in place, joined one mixer later."""
    SKIPPED = 4
    """Neither read nor computed; contributes nothing."""
    REMOTE = 5
    """Computed by another machine."""


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, as the client sees it."""

    token: int
    text: str
    """Text that became certain with this token; may be empty in mid-character."""
    finish: str | None = None
    """None, or why the text ended with this token: "stop", "length"."""
