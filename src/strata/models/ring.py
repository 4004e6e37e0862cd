"""Columns of past tokens in a ring: entry p % ring_entries is position p; before 0 lie zeros.

Invariant: a window writes its columns without waiting for commit. A window that may be cut back
(T <= MAX_WINDOW_TOKENS) never overwrites a column that a later window still reads, because the ring
is that much longer than what is read.
"""

from __future__ import annotations

import torch

from strata.kernels.ring import past_columns, store_columns
from strata.memory.frame import Frame
from strata.memory.state import StateSpec

__all__ = ["MAX_WINDOW_TOKENS", "assert_can_cut_back", "past_columns", "ring_spec", "store_columns"]

MAX_WINDOW_TOKENS = 16
"""Longest window of which a part may be rejected: twice the longest verify window."""


def ring_spec(n_columns_read: int, width: int, dtype: torch.dtype) -> StateSpec:
    """State of a part that reads the n_columns_read columns before its window."""
    return StateSpec("ring", (width,), dtype, ring_entries=n_columns_read + MAX_WINDOW_TOKENS)


def assert_can_cut_back(frame: Frame) -> None:
    """A frame that keeps its inputs may be committed in part, so it must be short."""
    assert not frame.keep_inputs or frame.T <= MAX_WINDOW_TOKENS, (
        f"a window of {frame.T} tokens cannot be cut back; at most {MAX_WINDOW_TOKENS}"
    )
