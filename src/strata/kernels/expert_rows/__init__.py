"""Op: the whole feed-forward of one expert on some rows, straight from the expert's blob.

    g = gate x (* scale) (+ bias)    u = up x (* scale) (+ bias)
    h = activation(g, u)             y = down h (* scale) (+ bias)

Rows are *unweighted*: the router's weight is applied by ``combine``. ``ExpertShape`` says where
the pieces lie, and whether a matrix is rows of the file or tiles (the same bits). Numerics:
docs/decisions/001-numerics-contract.md section 5; every implementation
equals ``ref.expert_rows_contract`` bit for bit.
"""

from strata.kernels.expert_rows.ref import expert_rows_contract, expert_rows_plain
from strata.kernels.expert_rows.shape import (
    ACTIVATIONS,
    ALIGN_BYTES,
    NATIVE,
    Activation,
    ExpertShape,
    Layouts,
    layout,
    relayout,
)

__all__ = [
    "ACTIVATIONS",
    "ALIGN_BYTES",
    "NATIVE",
    "Activation",
    "ExpertShape",
    "Layouts",
    "expert_rows_contract",
    "expert_rows_plain",
    "layout",
    "relayout",
]
