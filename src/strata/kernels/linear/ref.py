"""Row products in NumPy, bit-exact by the numerics contract, and the plain torch product.

Slow but complete: every weight type and layout. Memory beyond the arguments stays bounded by pieces
of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from strata.formats.weight_types import TYPES
from strata.kernels.numerics import F32, fma32, group_sums, quantize_activations
from strata.kernels.weight import Weight

N_SEGMENTS = 8
"""Partial sums of a quantized row (contract 3)."""
N_LANES = 32
"""Partial sums of a float row (contract 4)."""

_PIECE = 1 << 20


def linear(x_TK: torch.Tensor, w: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize, then multiply, all in dtype (float32 or float64): [T, N]. The plain truth."""
    _check(x_TK, w)
    y_TN = torch.empty((x_TK.shape[0], w.n_rows), dtype=dtype)
    x_TK = x_TK.to(dtype)
    for piece in _pieces(w.n_rows, w.n_cols):
        matrix = torch.from_numpy(w.dequantize(piece)).to(dtype)
        for t in range(len(x_TK)):
            # one product per token, its input aligned alike: BLAS rounds by shape and alignment
            y_TN[t, piece] = matrix @ x_TK[t].clone()
    return y_TN * w.scale


def linear_contract(x_TK: torch.Tensor, w: Weight) -> torch.Tensor:
    """The product with the contract's bits (sections 1 to 4): f32 [T, K] -> f32 [T, N]."""
    _check(x_TK, w)
    assert x_TK.dtype == torch.float32, "the contract is about f32 activations"
    y_TN = row_products(x_TK.numpy(), w)
    if w.scale != 1.0:
        y_TN *= np.float32(w.scale)
    return torch.from_numpy(y_TN)


def row_products(x_TK: F32, w: Weight) -> F32:
    """Contract sections 1 to 4 without the tensor scale: f32 [T, N]."""
    with np.errstate(all="ignore"):
        if TYPES[w.type].kind == "quantized":
            return _quantized_products(x_TK, w)
        return _float_products(x_TK, w)


def _quantized_products(x_TK: F32, w: Weight) -> F32:
    """Integer dots per group, f32 sums in eight segments (contract 1 to 3)."""
    n_tokens, n_cols = x_TK.shape
    group = TYPES[w.type].group
    q_TK, scale_TB = quantize_activations(x_TK)
    # group first: [K / group, T, group]
    q_GTg = q_TK.reshape(n_tokens, n_cols // group, group).transpose(1, 0, 2).astype(np.float32)
    sum_GT = group_sums(q_TK, group).T.astype(np.float32)
    scale_BT = scale_TB.T
    y_TN = np.empty((n_tokens, w.n_rows), np.float32)
    for piece in _pieces(w.n_rows, max(n_cols, n_tokens * n_cols // group)):
        codes = w.decode(piece)
        c_GgN = codes.codes.T.reshape(n_cols // group, group, -1).astype(np.float32)
        # every partial sum is an integer below 2^24, so f32 multiplication is exact in any order
        dot_GTN = q_GTg @ c_GgN
        minimum = None if codes.minimum is None else codes.minimum.T
        y_TN[:, piece] = _segment_sums(dot_GTN, sum_GT, scale_BT, codes.scale.T, minimum)
    return y_TN


def _segment_sums(
    dot_GTN: F32, sum_GT: F32, scale_BT: F32, scale_GN: F32, minimum_GN: F32 | None
) -> F32:
    """Contract 3: [T, N] from exact dots per group; step i adds block i of every segment."""
    n_blocks = len(scale_BT)
    groups_per_block = len(scale_GN) // max(n_blocks, 1)
    length = -(-n_blocks // N_SEGMENTS)
    partial = np.zeros((N_SEGMENTS, *dot_GTN.shape[1:]), np.float32)
    for i in range(length):
        blocks = np.arange(i, n_blocks, length)
        p = partial[: len(blocks)]
        x_scale = scale_BT[blocks][:, :, None]
        for h in range(groups_per_block):
            g = blocks * groups_per_block + h
            p = fma32(dot_GTN[g], x_scale * scale_GN[g][:, None, :], p)
            if minimum_GN is not None:
                p = fma32(sum_GT[g][:, :, None], -(x_scale * minimum_GN[g][:, None, :]), p)
        partial[: len(blocks)] = p
    low: F32 = (partial[0] + partial[1]) + (partial[2] + partial[3])
    high: F32 = (partial[4] + partial[5]) + (partial[6] + partial[7])
    return low + high


def _float_products(x_TK: F32, w: Weight) -> F32:
    """f32 fma in 32 lanes, folded in halves (contract 4)."""
    n_tokens, n_cols = x_TK.shape
    padding = -n_cols % N_LANES
    n_steps = (n_cols + padding) // N_LANES
    x_TcJ = np.pad(x_TK, ((0, 0), (0, padding))).reshape(n_tokens, n_steps, N_LANES)
    y_TN = np.empty((n_tokens, w.n_rows), np.float32)
    for piece in _pieces(w.n_rows, max(n_cols, n_tokens * N_LANES)):
        w_NK = np.pad(w.dequantize(piece), ((0, 0), (0, padding)))
        w_NcJ = w_NK.reshape(len(w_NK), n_steps, N_LANES)
        partial = np.zeros((n_tokens, len(w_NK), N_LANES), np.float32)
        for c in range(n_steps):
            partial = fma32(w_NcJ[None, :, c], x_TcJ[:, None, c], partial)
        while partial.shape[2] > 1:
            half = partial.shape[2] // 2
            partial = partial[:, :, :half] + partial[:, :, half:]
        y_TN[:, piece] = partial[:, :, 0]
    return y_TN


def _pieces(n_rows: int, cost: int) -> Iterator[slice]:
    """Row ranges of about a million numbers, ``cost`` numbers a row."""
    step = max(1, _PIECE // max(cost, 1))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _check(x_TK: torch.Tensor, w: Weight) -> None:
    """Shapes that cannot be multiplied are our own mistake."""
    assert x_TK.ndim == 2 and x_TK.shape[1] == w.n_cols, (tuple(x_TK.shape), w.n_rows, w.n_cols)
    assert tuple(w.data.shape) == w.data_shape(), (tuple(w.data.shape), w.data_shape())
