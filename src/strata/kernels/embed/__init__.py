"""embed: rows of a table by id, decoded to floats.

lookup(table, ids, dtype) -> [*ids.shape, n_cols]
    row ids[i] of the weight, decoded exactly to f32 and then converted to dtype.
Only the needed rows are touched, so the table may be a file mapping far larger than memory. Ids
must lie inside it.
"""

from strata.kernels.embed.ref import lookup

__all__ = ["lookup"]
