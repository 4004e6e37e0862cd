"""Addresses of cos and sin rows by position, in blocks that are made when first asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch

_BLOCKS_KEPT = 128

MakeBlock = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""block -> cos and sin f32 [positions_per_block, pairs] of positions block * that and up."""


class RotaryTables:
    """Tables of one rotary embedding. halves: pairs are dims (i, i + pairs), else (2i, 2i + 1)."""

    def __init__(self, make: MakeBlock, block_positions: int, pairs: int, halves: bool) -> None:
        self.pairs = pairs
        self.halves = halves
        self._make = make
        self._size = block_positions
        self._blocks: OrderedDict[int, tuple[int, int, torch.Tensor, torch.Tensor]] = OrderedDict()

    def runs(self, first: int, n: int, step: int = 1) -> Iterator[tuple[int, int, int, int]]:
        """Positions first, first + step, ... (n of them) as runs (i, count, cos, sin).

        cos and sin: addresses of the rows of position first + i * step; the next ones follow
        ``step`` rows apart. They hold until the next run is asked for.
        """
        i = 0
        while i < n:
            block, row = divmod(first + i * step, self._size)
            count = min(n - i, (self._size - row + step - 1) // step)
            cos, sin, *_ = self._block(block)
            offset = row * self.pairs * 4
            yield i, count, cos + offset, sin + offset
            i += count

    def _block(self, block: int) -> tuple[int, int, torch.Tensor, torch.Tensor]:
        found = self._blocks.get(block)
        if found is None:
            cos, sin = (t.contiguous() for t in self._make(block))
            assert cos.dtype == sin.dtype == torch.float32, "the kernels turn f32 heads"
            found = self._blocks[block] = (cos.data_ptr(), sin.data_ptr(), cos, sin)
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return found
