"""Op: one token's result from its experts' unweighted rows.

    acc[t] = shared[t] or +0
    for rank j ascending:  acc[t] = acc[t] + weight[t, j] * row[t * K + j]

Two roundings per rank and a fixed order, so it does not matter where a row was computed
(docs/decisions/001-numerics-contract.md section 6). Skipped rows are left out, whatever they hold.
copy_rows(index, source, out) brings the rows of one place into the rows of all.
"""

from strata.kernels.combine.ref import combine, combine_all, copy_rows

__all__ = ["combine", "combine_all", "copy_rows"]
