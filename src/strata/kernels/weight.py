"""A dense weight matrix as it lies in memory: in the file's type or its tiles, never widened."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.formats.quants import Codes, decode, dequantize
from strata.formats.quants_simple import F32
from strata.formats.tiles import Layout, decode_tiles, dequantize_tiles, tile_plan
from strata.formats.weight_types import TYPES


@dataclass(frozen=True)
class Weight:
    """Matrix [n_rows, n_cols] stored in a weight type of ``formats.quants``.

    data: layout "native": rows, uint8 [n_rows, row_bytes], contiguous (may be a read-only file
    mapping); layout "tiles": the tiles of ``formats.tiles``, uint8 [n_bytes], starting on a
    multiple of 128 bytes. scale: multiplies every output once, after the row sum (NVFP4's tensor
    scale); 1.0 for all other types.
    """

    type: str
    n_rows: int
    n_cols: int
    data: torch.Tensor
    scale: float = 1.0
    layout: Layout = "native"

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return int(self.data.numel())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Chosen rows of a native matrix, int64 [n] -> uint8 [n, row_bytes]; touches no others."""
        assert self.layout == "native", "tiles have no rows of bytes"
        return self.data.index_select(0, ids)

    def decode(self, rows: slice) -> Codes:
        """Codes, scales and minima of a range of rows; UnsupportedError for float types."""
        if self.layout == "tiles":
            return decode_tiles(self.type, self.data.numpy(), self.n_rows, self.n_cols, rows)
        return decode(TYPES[self.type], self.data[rows].numpy())

    def dequantize(self, rows: slice) -> F32:
        """A range of rows as f32 [rows, n_cols], without ``scale``."""
        if self.layout == "tiles":
            return dequantize_tiles(self.type, self.data.numpy(), self.n_rows, self.n_cols, rows)
        return dequantize(TYPES[self.type], self.data[rows].numpy())

    def data_shape(self) -> tuple[int, ...]:
        """The shape that ``data`` must have; n_cols must be whole blocks of the type."""
        if self.layout == "tiles":
            return (tile_plan(self.type, self.n_rows, self.n_cols).n_bytes,)
        return self.n_rows, TYPES[self.type].row_bytes(self.n_cols)


@dataclass(frozen=True)
class ShardedWeight(Weight):
    """A table looked up by row that lies in several pieces, row ranges in order; ``data`` is empty.

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
