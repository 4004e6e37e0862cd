"""The scalar arithmetic of the numerics contract in NumPy: fma, int8 activations, exp, silu.

Knows no weights. docs/decisions/001-numerics-contract.md is the law; the native and Triton kernels
are compared with these functions bit for bit. All values are f32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

BLOCK = 32
"""Activations per int8 block."""

_MIN_AMAX_BITS = np.float32(2.0**-100).view(np.int32)
_INF_BITS = np.int32(0x7F800000)


def fma32(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a * b + c rounded once to f32 (broadcasting), as C's fmaf.

    The f64 product of two f32 is exact, so only the sum is rounded before the result is. Rounding
    twice differs from rounding once only when the f64 sum, itself inexact, lies on a tie of the f32
    grid; a tie ends in at least 28 zero bits. Those few sums are rounded to odd first (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = np.atleast_1d(product + c)
        tie = total.view(np.int64) & 0x0FFFFFFF == 0
        if tie.any():
            product, addend, _ = np.broadcast_arrays(product, np.float64(c), total)
            total[tie] = _to_odd(total[tie], product[tie], addend[tie])
        return total.astype(np.float32).reshape(np.broadcast(product, c).shape)


def _to_odd(
    total: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """total = x + y rounded to nearest -> rounded to odd; every total given ends in a zero bit."""
    # Knuth's exact error of a sum
    y_part = total - x
    error = (x - (total - y_part)) + (y - y_part)
    inexact = np.isfinite(total) & (error != 0)
    # one step towards the exact sum: away from zero if the error has the sign of the total
    step = np.where((error > 0) == (total > 0), 1, -1) * inexact
    odd: NDArray[np.float64] = (total.view(np.int64) + step).view(np.float64)
    return odd


def quantize_activations(x_TK: F32) -> tuple[NDArray[np.int8], F32]:
    """Int8 blocks of 32 (contract 1): q [T, K] and scale [T, K / 32]; K is a multiple of 32.

    A block with a NaN or infinity inside gets scale NaN and q = 0; one below 2^-100 gets zeros.
    """
    blocks = np.ascontiguousarray(x_TK, np.float32).reshape(
        len(x_TK), x_TK.shape[1] // BLOCK, BLOCK
    )
    bits = (blocks.view(np.int32) & np.int32(0x7FFFFFFF)).max(axis=2)
    amax = bits.view(np.float32)
    usable = (bits < _INF_BITS) & (bits >= _MIN_AMAX_BITS)
    divisor = np.where(usable, amax, np.float32(1))
    scale = np.where(usable, divisor / np.float32(127), np.float32(0))
    scale[bits >= _INF_BITS] = np.nan
    inverse = np.float32(127) / divisor
    finite = np.where(usable[:, :, None], blocks, np.float32(0))
    q = np.rint(finite * inverse[:, :, None]).astype(np.int8)
    return q.reshape(x_TK.shape), scale


def group_sums(q_TK: NDArray[np.int8], group: int) -> NDArray[np.int32]:
    """Sums of each run of ``group`` (16 or 32) int8 activations: int32 [T, K / group]."""
    grouped = q_TK.reshape(len(q_TK), q_TK.shape[1] // group, group)
    sums: NDArray[np.int32] = grouped.sum(axis=2, dtype=np.int32)
    return sums


_EXP_COEFFICIENTS = np.array(
    [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
     5.0000001201e-1],
    np.float32,
)  # fmt: skip


def exp_c(x: F32) -> F32:
    """e^x by the contract's polynomial (contract 5): x is clamped to [-87, 88], NaN stays NaN."""
    is_nan = np.isnan(x)
    x = np.where(is_nan, np.float32(0), np.minimum(np.maximum(x, np.float32(-87)), np.float32(88)))
    n = np.rint(x * np.float32(1.44269504))
    r = fma32(n, np.float32(-0.693145752), x)
    r = fma32(n, np.float32(-1.42860677e-6), r)
    poly = np.broadcast_to(_EXP_COEFFICIENTS[0], r.shape)
    for coefficient in _EXP_COEFFICIENTS[1:]:
        poly = fma32(poly, r, coefficient)
    y = fma32(poly, r * r, r) + np.float32(1)
    power = (y.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
    return np.where(is_nan, np.float32(np.nan), power)


def sigmoid_like(g: F32, x: F32) -> F32:
    """g / (1 + exp_c(-x)): one addition, one IEEE division."""
    with np.errstate(invalid="ignore"):
        return g / (np.float32(1) + exp_c(-x))


def silu_c(g: F32) -> F32:
    """silu by exp_c (contract 5)."""
    return sigmoid_like(g, g)


def swiglu_oai_c(g: F32, u: F32, limit: float) -> F32:
    """gpt-oss's clamped activation of gate g and up u (contract 5); NaN stays NaN."""
    top = np.float32(limit)
    g = np.minimum(g, top)
    u = np.maximum(np.minimum(u, top), -top)
    with np.errstate(invalid="ignore", over="ignore"):
        return sigmoid_like(g, np.float32(1.702) * g) * (u + np.float32(1))
