"""Where the pieces of one expert lie inside its blob; the native pool mirrors this record.

Knows no tensors. Invariant: every piece begins on a multiple of 64 bytes, pieces do not overlap,
and ``blob_bytes`` is a multiple of 64, so that blobs laid end to end keep the alignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.weight_types import TYPES

ALIGN_BYTES = 64

Activation = Literal["silu", "swiglu_oai"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swiglu_oai")


@dataclass(frozen=True)
class ExpertShape:
    """One expert's feed-forward: D = d_model, F = d_expert; offsets are bytes inside the blob.

    gate, up: F rows of D weights; down: D rows of F weights; rows lie end to end in the storage
    type named. Biases: f32 [F], [F], [D]; -1 = none. scale_offset: three f32 that multiply the
    results of gate, up, down once, before the bias; -1 = none.
    """

    d_model: int
    d_expert: int
    gate_type: str
    up_type: str
    down_type: str
    gate_offset: int
    up_offset: int
    down_offset: int
    gate_bias_offset: int
    up_bias_offset: int
    down_bias_offset: int
    scale_offset: int
    activation: Activation
    swiglu_limit: float
    blob_bytes: int

    @property
    def gate_row_bytes(self) -> int:
        """Bytes of one gate row (D weights)."""
        return TYPES[self.gate_type].row_bytes(self.d_model)

    @property
    def up_row_bytes(self) -> int:
        """Bytes of one up row (D weights)."""
        return TYPES[self.up_type].row_bytes(self.d_model)

    @property
    def down_row_bytes(self) -> int:
        """Bytes of one down row (F weights)."""
        return TYPES[self.down_type].row_bytes(self.d_expert)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the three matrices alone."""
        return self.d_expert * (self.gate_row_bytes + self.up_row_bytes) + (
            self.d_model * self.down_row_bytes
        )


def layout(
    d_model: int,
    d_expert: int,
    types: tuple[str, str, str],
    *,
    bias: bool = False,
    scales: bool = False,
    activation: Activation = "silu",
    swiglu_limit: float = 7.0,
) -> ExpertShape:
    """Place gate, up, down, then biases, then out-scales, each 64-byte aligned.

    types: weight type names of gate, up, down. Raises UnsupportedError for a type or activation
    that no expert can have and FormatError when a width is not whole blocks of its type.
    """
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"expert activation {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    end = 0

    def place(n_bytes: int, wanted: bool = True) -> int:
        nonlocal end
        if not wanted:
            return -1
        start = end
        end = -(-(start + n_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        return start

    gate, up, down = types
    gate_offset = place(d_expert * _row_bytes("gate", gate, d_model))
    up_offset = place(d_expert * _row_bytes("up", up, d_model))
    down_offset = place(d_model * _row_bytes("down", down, d_expert))
    gate_bias_offset = place(4 * d_expert, bias)
    up_bias_offset = place(4 * d_expert, bias)
    down_bias_offset = place(4 * d_model, bias)
    scale_offset = place(3 * 4, scales)
    return ExpertShape(
        d_model=d_model,
        d_expert=d_expert,
        gate_type=gate,
        up_type=up,
        down_type=down,
        gate_offset=gate_offset,
        up_offset=up_offset,
        down_offset=down_offset,
        gate_bias_offset=gate_bias_offset,
        up_bias_offset=up_bias_offset,
        down_bias_offset=down_bias_offset,
        scale_offset=scale_offset,
        activation=activation,
        swiglu_limit=swiglu_limit,
        blob_bytes=end,
    )


def _row_bytes(piece: str, type_name: str, n_cols: int) -> int:
    """Bytes of a row, or one clear line why this expert cannot be."""
    weight_type = TYPES.get(type_name)
    if weight_type is None or weight_type.kind == "integer":
        raise UnsupportedError(
            f"expert {piece} matrix has type {type_name!r}, which holds no weights; "
            f"use a checkpoint whose experts are float or quantized"
        )
    if n_cols <= 0 or n_cols % weight_type.block_weights:
        raise FormatError(
            f"expert {piece} matrix has {n_cols} columns, not whole blocks of "
            f"{weight_type.block_weights} as {type_name} needs; "
            f"the file's shapes contradict its types"
        )
    return weight_type.row_bytes(n_cols)
