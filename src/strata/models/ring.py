"""Columns of past tokens in a ring: entry p % ring_entries is position p; before 0 lie zeros.

Invariant: a window writes its columns without waiting for commit. A window that may be cut back
(T <= MAX_WINDOW_TOKENS) never overwrites a column that a later window still reads, because the ring
is that much longer than what is read.
"""

from __future__ import annotations

import torch

from strata.memory.frame import Frame
from strata.memory.state import StateSpec

MAX_WINDOW_TOKENS = 16
"""Longest window of which a part may be rejected: twice the longest verify window."""


def ring_spec(n_columns_read: int, width: int, dtype: torch.dtype) -> StateSpec:
    """State of a part that reads the n_columns_read columns before its window."""
    return StateSpec("ring", (width,), dtype, ring_entries=n_columns_read + MAX_WINDOW_TOKENS)


def past_columns(ring: torch.Tensor, start: int, n: int) -> torch.Tensor:
    """Columns of positions start - n .. start - 1 as [n, width], oldest first."""
    position = torch.arange(start - n, start, device=ring.device)
    columns = ring.index_select(0, position % ring.shape[0])
    columns[: max(0, n - start)] = 0
    return columns


def store_columns(ring: torch.Tensor, start: int, x_TN: torch.Tensor) -> None:
    """Store columns of positions start and up; of more than the ring holds, the last ones."""
    n = min(x_TN.shape[0], ring.shape[0])
    end = start + x_TN.shape[0]
    position = torch.arange(end - n, end, device=ring.device)
    ring[position % ring.shape[0]] = x_TN[x_TN.shape[0] - n :]


def assert_can_cut_back(frame: Frame) -> None:
    """A frame that keeps its inputs may be committed in part, so it must be short."""
    assert not frame.keep_inputs or frame.T <= MAX_WINDOW_TOKENS, (
        f"a window of {frame.T} tokens cannot be cut back; at most {MAX_WINDOW_TOKENS}"
    )
