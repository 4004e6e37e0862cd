"""The numerics contract once more, one number at a time, with C's fmaf: the tests' transcription.

Written from docs/decisions/001-numerics-contract.md alone. Slow; for a few rows only.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from collections.abc import Sequence

import numpy as np

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fmaf.restype = ctypes.c_float
_libm.fmaf.argtypes = [ctypes.c_float] * 3

f32 = np.float32


def fmaf(a: float, b: float, c: float) -> np.float32:
    """a * b + c rounded once, by the C library."""
    return f32(_libm.fmaf(a, b, c))


def quantize_block(x: Sequence[float]) -> tuple[list[int], np.float32]:
    """Section 1: 32 activations -> (q, s_x)."""
    amax = f32(0)
    for value in x:
        if not math.isfinite(value):
            return [0] * 32, f32(np.nan)
        amax = max(amax, abs(f32(value)))
    if amax < f32(2.0**-100):
        return [0] * 32, f32(0)
    r = f32(127) / amax
    return [round(float(f32(v) * r)) for v in x], amax / f32(127)  # round(): half to even


def quantized_row(codes, scale, minimum, group: int, x) -> np.float32:
    """Section 3: a row (codes [k], scale and minimum [k / group]) times an activation row [k]."""
    n_blocks = len(codes) // 32
    length = math.ceil(n_blocks / 8)
    partial = []
    for segment in range(8):
        p = f32(0)
        for b in range(segment * length, min((segment + 1) * length, n_blocks)):
            q, s_x = quantize_block(x[32 * b : 32 * b + 32])
            for h in range(32 // group):
                first = 32 * b + group * h
                w = [int(c) for c in codes[first : first + group]]
                a = q[group * h : group * h + group]
                g = first // group
                dot = sum(i * j for i, j in zip(w, a, strict=True))
                p = fmaf(dot, s_x * scale[g], p)
                if minimum is not None:
                    p = fmaf(sum(a), -(s_x * minimum[g]), p)
        partial.append(p)
    p0, p1, p2, p3, p4, p5, p6, p7 = partial
    return ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))


def float_row(w, x) -> np.float32:
    """Section 4: one f32 row [k] times one activation row [k]."""
    p = [f32(0)] * 32
    padding = -len(w) % 32
    for k, (a, b) in enumerate(zip([*w, *[0] * padding], [*x, *[0] * padding], strict=True)):
        p[k % 32] = fmaf(a, b, p[k % 32])
    for half in (16, 8, 4, 2, 1):
        p = [p[j] + p[j + half] for j in range(half)]
    return p[0]


def exp_c(x: float) -> np.float32:
    """Section 5."""
    x = f32(x)
    if math.isnan(x):
        return f32(np.nan)
    x = min(max(x, f32(-87)), f32(88))
    n = round(float(x * f32(1.44269504)))
    r = fmaf(n, f32(-0.693145752), x)
    r = fmaf(n, f32(-1.42860677e-6), r)
    p = f32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fmaf(p, r, f32(c))
    y = fmaf(p, r * r, r) + f32(1)
    return f32(math.ldexp(float(y), n))


def silu(g: float) -> np.float32:
    """Section 5."""
    return f32(g) / (f32(1) + exp_c(-f32(g)))


def swiglu_oai(g: float, u: float, limit: float) -> np.float32:
    """Section 5: the hidden value h."""
    g = min(f32(g), f32(limit))
    u = max(min(f32(u), f32(limit)), f32(-limit))
    return (g / (f32(1) + exp_c(-(f32(1.702) * g)))) * (u + f32(1))
