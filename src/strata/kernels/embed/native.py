"""Table rows through the kernels' own decoders, which have the bits of the format decoders."""

from __future__ import annotations

import torch

from strata.core.errors import EngineError
from strata.kernels.embed import ref
from strata.kernels.weight import ShardedWeight, Weight
from strata.native.rows import KERNEL_TYPES, decode_rows


def lookup(table: Weight, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See the package docstring. EngineError for an id outside the table."""
    plain = table.layout == "native" and not isinstance(table, ShardedWeight)
    if not plain or table.type not in KERNEL_TYPES or not table.data.is_contiguous():
        return ref.lookup(table, ids, dtype)
    chosen = ids.reshape(-1).tolist()
    if chosen and not 0 <= min(chosen) <= max(chosen) < table.n_rows:
        raise EngineError(
            f"lookup of rows {min(chosen)} .. {max(chosen)} in a table of {table.n_rows}"
        )
    rows = torch.empty((len(chosen), table.n_cols), dtype=torch.float32)
    decode_rows(table.type, table.data, table.n_cols, chosen, rows)
    if table.scale != 1.0:
        rows *= table.scale
    return rows.to(dtype).view(*ids.shape, table.n_cols)
