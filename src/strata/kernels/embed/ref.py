"""Table rows through the format decoders; the contract is in the package docstring."""

from __future__ import annotations

import torch

from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight


def lookup(table: Weight, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decoded rows of the table, [*ids.shape, n_cols], on the table's device."""
    flat = ids.reshape(-1).to(table.data.device)
    raw = table.rows(flat)
    rows = torch.from_numpy(dequantize(TYPES[table.type], raw.cpu().numpy())).to(raw.device)
    if table.scale != 1.0:
        rows *= table.scale
    return rows.to(dtype).view(*ids.shape, table.n_cols)
