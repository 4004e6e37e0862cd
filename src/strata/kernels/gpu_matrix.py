"""Matrices as GPU kernels see them: everything about their layout, known at compile time.

Knows no Triton and no data. The records are frozen and hashable; a kernel is compiled for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.formats.tile_formats import require_format, tile_plan
from strata.kernels.gpu_weight import DTYPE_NAMES, GpuWeight

_MOST_STEPS = 8
"""Additions of a lane of float rows while lanes <= 4096: all loads of a row are in flight."""


@dataclass(frozen=True)
class TileMatrix:
    """A matrix [n_rows, n_cols] in tiles as kernels see it: all of it known at compile time.

    table: the code table as 4 signed words of 4 entries, or 2 when stored codes are below 8, or ()
    for linear codes. lifted: its entries are c + bias >= 0. scales, minimums, supers: byte offsets
    of the planes. The other fields are those of ``formats.tile_formats.TileFormat``.
    """

    n_rows: int
    n_cols: int
    tile_rows: int
    bits: int
    mul: int
    bias: int
    table: tuple[int, ...]
    lifted: bool
    scale: str
    scale_blocks: int
    group: int
    signed: bool
    factor: float
    has_min: bool
    scales: int
    minimums: int
    supers: int


def tile_matrix(type_name: str, n_rows: int, n_cols: int) -> TileMatrix:
    """The record of a matrix of that type.

    UnsupportedError for a type without tiles, FormatError when n_cols is not whole blocks of it.
    """
    form, plan = require_format(type_name), tile_plan(type_name, n_rows, n_cols)
    mul, bias, table, lifted = form.mul, form.bias, form.table or (), False
    if not any(table[8:]):
        table = table[:8]
    elif max(table) - min(table) < 128:
        mul, bias, lifted = 1, -min(table), True
        table = tuple(c + bias for c in table)
    words = tuple(_word(table[i : i + 4]) for i in range(0, len(table), 4))
    return TileMatrix(
        n_rows,
        n_cols,
        plan.tile_rows,
        form.bits,
        mul,
        bias,
        words,
        lifted,
        form.scale,
        form.scale_blocks,
        form.group,
        form.signed,
        form.factor,
        form.has_min,
        plan.scales,
        plan.minimums,
        plan.supers,
    )


def factors(matrix: TileMatrix) -> int:
    """Numbers that a block leaves for each row and token: two for each fma of contract 3."""
    return 2 * (32 // matrix.group) * (2 if matrix.has_min else 1)


def _word(entries: tuple[int, ...]) -> int:
    """Four signed bytes as one signed 32-bit word."""
    return int.from_bytes(bytes(c & 255 for c in entries), "little", signed=True)


@dataclass(frozen=True)
class FloatMatrix:
    """A row-major matrix [n_rows, n_cols] as kernels see it: all of it known at compile time.

    dtype: "BF16", "F16" or "F32". lanes: partial sums of a row. vector: columns of a lane's 16
    bytes, or 1 when rows do not begin on multiples of 16 bytes. contract: sums in the order of
    the numerics contract (kernels/contract_rows), which lanes and vector then say nothing of.
    """

    n_rows: int
    n_cols: int
    dtype: str
    lanes: int
    vector: int
    contract: bool = False


def float_matrix(dtype: str, n_rows: int, n_cols: int) -> FloatMatrix:
    """The record of a matrix of that dtype ("BF16", "F16", "F32")."""
    vector = {"BF16": 8, "F16": 8, "F32": 4}[dtype]
    wanted = -(-n_cols // _MOST_STEPS)
    lanes = min(max(1 << (wanted - 1).bit_length(), 32), 4096)
    return FloatMatrix(n_rows, n_cols, dtype, lanes, vector if n_cols % vector == 0 else 1)


Matrix = TileMatrix | FloatMatrix


def matrix_of(weight: GpuWeight) -> Matrix:
    """The record of a weight."""
    if weight.is_tiles:
        return tile_matrix(weight.type, weight.n_rows, weight.n_cols)
    return float_matrix(DTYPE_NAMES[weight.data.dtype], weight.n_rows, weight.n_cols)
