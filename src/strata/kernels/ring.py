"""Columns of past tokens in a ring: entry p % ring_entries is position p; before 0 lie zeros."""

from __future__ import annotations

import torch


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
