"""Where the pieces of one expert lie inside its blob; the native pool mirrors this record.

Knows no tensors. Invariant: every piece begins on a multiple of 64 bytes (tiles: of 128), pieces do
not overlap, and ``blob_bytes`` is a multiple of 64 (128 with tiles), so that blobs laid end to end
keep the alignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.tile_formats import PLANE_ALIGN, tile_format
from strata.formats.tiles import Layout, matrix_bytes
from strata.formats.weight_types import TYPES

ALIGN_BYTES = 64

Activation = Literal["silu", "swiglu_oai"]
Layouts = tuple[Layout, Layout, Layout]
"""Of gate, up and down."""
NATIVE: Layouts = ("native", "native", "native")
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swiglu_oai")


@dataclass(frozen=True)
class ExpertShape:
    """One expert's feed-forward: D = d_model, F = d_expert; offsets are bytes inside the blob.

    gate, up: F rows of D weights; down: D rows of F weights, in the storage type named: rows end
    to end (layout "native") or tiles. Biases: f32 [F], [F], [D]; -1 = none. scale_offset: three
    f32 that multiply the results of gate, up, down once, before the bias; -1 = none.
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
    gate_layout: Layout = "native"
    up_layout: Layout = "native"
    down_layout: Layout = "native"

    @property
    def layouts(self) -> Layouts:
        """Layouts of gate, up and down."""
        return self.gate_layout, self.up_layout, self.down_layout

    @property
    def types(self) -> tuple[str, str, str]:
        """Weight types of gate, up and down."""
        return self.gate_type, self.up_type, self.down_type

    @property
    def matrix_bytes(self) -> tuple[int, int, int]:
        """Bytes of gate, up and down in their layouts."""
        d, f = self.d_model, self.d_expert
        return (
            matrix_bytes(self.gate_type, self.gate_layout, f, d),
            matrix_bytes(self.up_type, self.up_layout, f, d),
            matrix_bytes(self.down_type, self.down_layout, d, f),
        )

    @property
    def gate_row_bytes(self) -> int:
        """Bytes of one gate row (D weights) as the file has it."""
        return TYPES[self.gate_type].row_bytes(self.d_model)

    @property
    def up_row_bytes(self) -> int:
        """Bytes of one up row (D weights) as the file has it."""
        return TYPES[self.up_type].row_bytes(self.d_model)

    @property
    def down_row_bytes(self) -> int:
        """Bytes of one down row (F weights) as the file has it."""
        return TYPES[self.down_type].row_bytes(self.d_expert)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the three matrices alone."""
        return sum(self.matrix_bytes)


def layout(
    d_model: int,
    d_expert: int,
    types: tuple[str, str, str],
    *,
    bias: bool = False,
    scales: bool = False,
    activation: Activation = "silu",
    swiglu_limit: float = 7.0,
    layouts: Layouts = NATIVE,
) -> ExpertShape:
    """Place gate, up, down, then biases, then out-scales, each 64-byte aligned (tiles: 128).

    types: weight type names of gate, up, down. Raises UnsupportedError for a type, layout or
    activation that no expert can have and FormatError when a width is not whole blocks of its type.
    """
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"expert activation {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    place = _Placer(PLANE_ALIGN if "tiles" in layouts else ALIGN_BYTES)
    sizes = {"gate": (d_expert, d_model), "up": (d_expert, d_model), "down": (d_model, d_expert)}
    gate_offset, up_offset, down_offset = (
        place(_matrix_bytes(piece, kind, how, *sizes[piece]))
        for piece, kind, how in zip(sizes, types, layouts, strict=True)
    )
    gate_bias_offset = place(4 * d_expert, bias)
    up_bias_offset = place(4 * d_expert, bias)
    down_bias_offset = place(4 * d_model, bias)
    scale_offset = place(3 * 4, scales)
    return ExpertShape(
        d_model=d_model,
        d_expert=d_expert,
        gate_type=types[0],
        up_type=types[1],
        down_type=types[2],
        gate_offset=gate_offset,
        up_offset=up_offset,
        down_offset=down_offset,
        gate_bias_offset=gate_bias_offset,
        up_bias_offset=up_bias_offset,
        down_bias_offset=down_bias_offset,
        scale_offset=scale_offset,
        activation=activation,
        swiglu_limit=swiglu_limit,
        blob_bytes=place.end,
        gate_layout=layouts[0],
        up_layout=layouts[1],
        down_layout=layouts[2],
    )


class _Placer:
    """Gives out places one after another, each aligned."""

    def __init__(self, align: int) -> None:
        self.end = 0
        self._align = align

    def __call__(self, n_bytes: int, wanted: bool = True) -> int:
        """Where the next n_bytes begin; -1 for a piece that is not there."""
        if not wanted:
            return -1
        start = self.end
        self.end = -(-(start + n_bytes) // self._align) * self._align
        return start


def relayout(shape: ExpertShape, layouts: Layouts) -> ExpertShape:
    """The same expert with its matrices in other layouts. Errors as for ``layout``."""
    return layout(
        shape.d_model,
        shape.d_expert,
        shape.types,
        bias=shape.gate_bias_offset >= 0,
        scales=shape.scale_offset >= 0,
        activation=shape.activation,
        swiglu_limit=shape.swiglu_limit,
        layouts=layouts,
    )


def _matrix_bytes(piece: str, type_name: str, layout: Layout, n_rows: int, n_cols: int) -> int:
    """Bytes of a matrix, or one clear line why this expert cannot be."""
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
    if layout == "tiles" and tile_format(type_name) is None:
        raise UnsupportedError(
            f"expert {piece} matrix of type {type_name} has no tiles; use --expert-layout native"
        )
    return matrix_bytes(type_name, layout, n_rows, n_cols)
