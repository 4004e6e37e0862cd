"""Matrix rows and numbers out of a checkpoint, in the type the program keeps them in.

Knows no roles and no models.

Block-FP8 matrices (weight and weight_scale_inv) become rows that carry their scales; everything
else is a view of the file. NVFP4's tensor scale lies in a tensor of its own beside the matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import Checkpoint, TensorInfo
from strata.formats.quants import dequantize, fp8_b128_rows
from strata.formats.weight_types import TYPES

_FP8 = "F8_E4M3"
_FP8_ROWS = "F8_E4M3_B128"
_NOT_MATRICES = ("F64", "F8_E5M2")


def scale_inv_name(ckpt: Checkpoint, name: str) -> str | None:
    """The block scales beside an FP8 matrix; None for other types.

    UnsupportedError when they are not there.
    """
    if ckpt.info(name).type.name != _FP8:
        return None
    for candidate in (name + "_scale_inv", name.removesuffix(".weight") + ".weight_scale_inv"):
        if candidate in ckpt.tensors:
            return candidate
    raise UnsupportedError(
        f"tensor {name} is FP8 but there is no {name}_scale_inv beside it; only FP8 with a scale "
        f"per block of 128 x 128 is supported, use the BF16 checkpoint"
    )


def scale_name(ckpt: Checkpoint, name: str) -> str | None:
    """The tensor scale beside an NVFP4 matrix ("<base>.scale"), or None."""
    beside = name.removesuffix(".weight") + ".scale"
    return beside if ckpt.info(name).type.name == "NVFP4" and beside in ckpt.tensors else None


def companions(ckpt: Checkpoint, name: str) -> tuple[str, ...]:
    """The scale tensors that belong to a matrix."""
    found = (scale_inv_name(ckpt, name), scale_name(ckpt, name))
    return tuple(n for n in found if n is not None)


def row_type(ckpt: Checkpoint, name: str) -> str:
    """Type of the rows that ``matrix_rows`` gives.

    UnsupportedError for types that are no matrix of weights.
    """
    info = ckpt.info(name)
    if info.type.name == _FP8:
        return _FP8_ROWS
    if info.type.kind == "integer" or info.type.name in _NOT_MATRICES:
        raise UnsupportedError(
            f"tensor {name} is {info.type.name}; a weight matrix must be F32, F16, BF16, block FP8 "
            f"or one of the quantized types, convert the file"
        )
    return info.type.name


def row_bytes(type_name: str, n_cols: int) -> int:
    """Bytes of one row; FormatError when the width is not a whole number of blocks."""
    try:
        return TYPES[type_name].row_bytes(n_cols)
    except ValueError as error:
        raise FormatError(f"rows of {n_cols} weights in {type_name}: {error}") from None


def matrix_rows(ckpt: Checkpoint, name: str, index: int | None = None) -> NDArray[np.uint8]:
    """Rows of a matrix, uint8 [n_rows, row_bytes]; a view, but for block FP8.

    index: which matrix of a 3-D tensor [n, rows, cols]; None: all rows of a tensor of any number of
    axes.
    """
    info = ckpt.info(name)
    rows = ckpt.rows(name)
    if index is not None:
        per = info.shape[-2]
        rows = rows[index * per : (index + 1) * per]
    scales = scale_inv_name(ckpt, name)
    if scales is None:
        return rows
    scale = ckpt.float32(scales)
    if index is not None:
        return fp8_b128_rows(rows, scale[index])
    if len(info.shape) == 3:
        return np.concatenate([matrix_rows(ckpt, name, i) for i in range(info.shape[0])])
    return fp8_b128_rows(rows, scale)


def tensor_scale(ckpt: Checkpoint, name: str, index: int = 0) -> float:
    """What every product with the matrix is multiplied by (NVFP4); 1.0 for all other types."""
    beside = scale_name(ckpt, name)
    if beside is None:
        return 1.0
    scales = ckpt.float32(beside).reshape(-1)
    return float(scales[index if len(scales) > 1 else 0])


def float_row(ckpt: Checkpoint, name: str, row: int) -> NDArray[np.float32]:
    """One row of a small matrix of numbers (a bias per expert), f32."""
    numbers: NDArray[np.float32] = dequantize(ckpt.info(name).type, ckpt.rows(name)[row : row + 1])[
        0
    ]
    return numbers


def shape_error(info: TensorInfo, what: str, expected: tuple[int, ...]) -> FormatError:
    """The refusal of a tensor whose shape does not fit the config."""
    return FormatError(
        f"tensor {info.name} has shape {list(info.shape)}, but {what} must be {list(expected)} by "
        f"the model's settings; settings and weights belong to different models"
    )
