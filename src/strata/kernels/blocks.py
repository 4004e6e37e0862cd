"""Cutting long tensors into blocks of rows whose temporaries stay in the CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK_ELEMENTS = 1 << 16


def row_blocks(n_rows: int, row_elements: int) -> Iterator[slice]:
    """Slices over n_rows rows of row_elements numbers each, about 65,000 numbers a slice."""
    step = max(1, _BLOCK_ELEMENTS // max(1, row_elements))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)
