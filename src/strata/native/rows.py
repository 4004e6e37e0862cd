"""Single steps of the row kernels, for tests and tools: decoding a row, quantizing activations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.weight_types import TYPES
from strata.native.extension import _native
from strata.native.isa import available_isas, pick_isa

KERNEL_TYPES = frozenset(row[0] for row in _native.type_table())
"""Names of the weight types that the row kernels know."""


def dequantize(
    type_name: str, raw: npt.NDArray[np.uint8], isa: str = "auto"
) -> npt.NDArray[np.float32]:
    """Rows uint8 [rows, row_bytes] as f32 [rows, n], decoded by the kernels' own decoders.

    UnsupportedError for a type without kernels, FormatError when the rows are not whole blocks.
    """
    if type_name not in KERNEL_TYPES:
        raise UnsupportedError(f"no row kernels for weight type {type_name}")
    kind = TYPES[type_name]
    whole = raw.ndim == 2 and raw.shape[1] > 0 and raw.shape[1] % kind.block_bytes == 0
    if raw.dtype != np.uint8 or not whole:
        raise FormatError(
            f"{raw.dtype} array of shape {list(raw.shape)} is not rows of {type_name}, which needs "
            f"uint8 [rows, multiple of {kind.block_bytes}]"
        )
    raw = np.ascontiguousarray(raw)
    n_cols = raw.shape[1] // kind.block_bytes * kind.block_weights
    out = np.empty((raw.shape[0], n_cols), np.float32)
    _native.dequantize(
        pick_isa(isa, available_isas()),
        type_name,
        raw.ctypes.data,
        raw.shape[0],
        n_cols,
        out.ctypes.data,
    )
    return out


@cache
def _best_isa() -> str:
    return available_isas()[-1]


def decode_rows(
    type_name: str, data: torch.Tensor, n_cols: int, ids: Sequence[int], out: torch.Tensor
) -> None:
    """Rows of a contiguous matrix uint8 [rows, row_bytes] into out f32 [len(ids), n_cols].

    The caller has checked the ids; the type must be one of KERNEL_TYPES.
    """
    row_bytes = TYPES[type_name].row_bytes(n_cols)
    assert data.shape[1] == row_bytes and data.is_contiguous() and out.is_contiguous()
    assert out.dtype == torch.float32 and out.shape == (len(ids), n_cols)
    isa, rows, to = _best_isa(), data.data_ptr(), out.data_ptr()
    for i, row in enumerate(ids):
        at = rows + row * row_bytes
        _native.dequantize(isa, type_name, at, 1, n_cols, to + 4 * n_cols * i)


def quantize_activations(
    x_TK: npt.NDArray[np.float32], isa: str = "auto"
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Section 1 of the numerics contract: q [T, K], s_x [T, K / 32], sums of q per 16 [T, K / 16].

    FormatError when K is not a multiple of 32.
    """
    n_rows, n_cols = x_TK.shape
    if n_cols % 32 or not n_cols:
        raise FormatError(f"activations of width {n_cols} are not whole blocks of 32")
    x_TK = np.ascontiguousarray(x_TK, np.float32)
    q = np.empty((n_rows, n_cols), np.int8)
    scale = np.empty((n_rows, n_cols // 32), np.float32)
    half = np.empty((n_rows, n_cols // 16), np.int32)
    _native.quantize(
        pick_isa(isa, available_isas()),
        x_TK.ctypes.data,
        n_rows,
        n_cols,
        q.ctypes.data,
        scale.ctypes.data,
        half.ctypes.data,
    )
    return q, scale, half
