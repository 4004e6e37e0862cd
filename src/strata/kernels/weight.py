"""A dense weight matrix as it lies in memory: rows in the file's own type, never widened on load."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weight:
    """Matrix [n_rows, n_cols] whose rows are stored in a weight type of ``formats.quants``.

    data: uint8 [n_rows, row_bytes], contiguous (may be a read-only file mapping).
    scale: multiplies every output once, after the row sum (NVFP4's tensor scale); 1.0 for all other types.
    """

    type: str
    n_rows: int
    n_cols: int
    data: torch.Tensor
    scale: float = 1.0

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return int(self.data.numel())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Chosen rows, int64 [n] -> uint8 [n, row_bytes], a copy; only these rows are touched."""
        return self.data.index_select(0, ids)


@dataclass(frozen=True)
class ShardedWeight(Weight):
    """A table that is looked up by row and lies in several pieces, row ranges in order; ``data`` is empty.

    shards: uint8 [any, row_bytes] each (file mappings).
    """

    shards: tuple[torch.Tensor, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(int(shard.numel()) for shard in self.shards)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Chosen rows, int64 [n] -> uint8 [n, row_bytes], a copy; only these rows are touched."""
        ends = torch.tensor([len(shard) for shard in self.shards]).cumsum(0)
        found = self.data.new_empty(len(ids), self.shards[0].shape[1])
        home = torch.searchsorted(ends, ids, right=True)
        for index in sorted(set(home.tolist())):
            here = home == index
            found[here] = self.shards[index][ids[here] - (ends[index] - len(self.shards[index]))]
        return found
