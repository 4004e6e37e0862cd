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
