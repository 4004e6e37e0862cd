# mypy: allow-untyped-defs, allow-untyped-decorators
"""Arithmetic of the numerics contract as Triton device functions, shared by the GPU kernels.

Knows no weights and no layouts. docs/decisions/001-numerics-contract.md is the law. Every kernel
that calls these is launched with ``**EXACT``: the compiler must not contract a product and a sum.
Under the Triton interpreter (no inline assembly there) the same functions take a plain path with
the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from strata.kernels.triton_plain import plain_dp4a, plain_dp4a_unsigned, plain_fma, plain_prmt

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""True when kernels run in Triton's interpreter on the CPU."""

EXACT = {"enable_fp_fusion": False}
"""Launch arguments of every kernel with exact arithmetic."""

SEGMENTS = tl.constexpr(8)
"""Partial sums of a quantized row (contract 3)."""

# 1.5 * 2^23: adding it to |x| < 2^22 leaves the rounded integer in the low mantissa bits
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def fma(a, b, c):
    """a * b + c, rounded once (the interpreter's own fma rounds twice)."""
    return plain_fma(a, b, c) if INTERPRET else tl.fma(a, b, c)


@triton.jit
def rint(x):
    """Nearest integer as f32, half to even, for |x| < 2^22."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def opaque_zero():
    """0, but the compiler cannot know: our grids have two axes at most."""
    if INTERPRET:
        return 0
    else:
        return tl.program_id(2)


@triton.jit
def _dot4(INSTRUCTION: tl.constexpr, a, b, c):
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dp4a(a, b, c):
    """c + sum of the products of four signed bytes of int32 a and b."""
    return plain_dp4a(a, b, c) if INTERPRET else _dot4("dp4a.s32.s32 $0, $1, $2, $3;", a, b, c)


@triton.jit
def dp4a_unsigned(a, b, c):
    """c + sum of the products of four unsigned bytes of int32 a and signed bytes of b."""
    return (
        plain_dp4a_unsigned(a, b, c)
        if INTERPRET
        else _dot4("dp4a.u32.s32 $0, $1, $2, $3;", a, b, c)
    )


@triton.jit
def prmt(a, b, selector):
    """Four bytes out of the eight of (a, b): byte i is number ``selector >> 4 i & 7``.

    With bit 3 of the field set it is eight copies of that byte's sign.
    """
    if INTERPRET:
        y = plain_prmt(a, b, selector)
    else:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, selector],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def load_words4(address):
    """Four int32 from each int64 address, a multiple of 16; not for memory this kernel writes."""
    if INTERPRET:
        p = address.to(tl.pointer_type(tl.int32))
        words = (tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3))
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [address],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def load_words2(address):
    """Two int32 from each int64 address, a multiple of 8; not for memory this kernel writes."""
    if INTERPRET:
        p = address.to(tl.pointer_type(tl.int32))
        words = (tl.load(p), tl.load(p + 1))
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [address],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def load_words4_now(address):
    """``load_words4`` that stays where it stands: the assembler moves it behind no barrier."""
    if INTERPRET:
        words = load_words4(address)
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [address],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def load_words2_now(address):
    """``load_words2`` that stays where it stands."""
    if INTERPRET:
        words = load_words2(address)
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [address],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def exp_c(x):
    """e^x by the contract's polynomial; x is clamped to [-87, 88], NaN stays NaN."""
    y = tl.where(x == x, x, 0.0)
    y = tl.where(y < -87.0, -87.0, y)
    y = tl.where(y > 88.0, 88.0, y)
    n = rint(y * 1.44269504)
    r = fma(n, tl.full(y.shape, -0.693145752, tl.float32), y)
    r = fma(n, tl.full(y.shape, -1.42860677e-6, tl.float32), r)
    p = tl.full(y.shape, 1.9875691500e-4, tl.float32)
    p = fma(p, r, tl.full(y.shape, 1.3981999507e-3, tl.float32))
    p = fma(p, r, tl.full(y.shape, 8.3334519073e-3, tl.float32))
    p = fma(p, r, tl.full(y.shape, 4.1665795894e-2, tl.float32))
    p = fma(p, r, tl.full(y.shape, 1.6666665459e-1, tl.float32))
    p = fma(p, r, tl.full(y.shape, 5.0000001201e-1, tl.float32))
    e = fma(p, r * r, r) + 1.0
    power = (e.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    return tl.where(x == x, power, float("nan"))


@triton.jit
def sigmoid_like(g, x):
    """g / (1 + exp_c(-x)): one addition, one IEEE division."""
    return tl.div_rn(g, exp_c(-x) + 1.0)


@triton.jit
def activate(g, u, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """The expert's activation (contract 5) of gate g and up u; NaN stays NaN."""
    if ACTIVATION == "swiglu_oai":
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, u)
        u = tl.where(u < -LIMIT, -LIMIT, u)
        h = sigmoid_like(g, g * 1.702) * (u + 1.0)
    else:
        h = sigmoid_like(g, g) * u
    return h


@triton.jit
def fold8(p, N: tl.constexpr):
    """[8, N] -> [N]: ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7)), by sums of two."""
    y = tl.sum(tl.reshape(p, (4, 2, N)), axis=1)
    y = tl.sum(tl.reshape(y, (2, 2, N)), axis=1)
    return tl.sum(y, axis=0)


@triton.constexpr_function
def pick(items, i):
    """items[i] at compile time."""
    return items[i]


@triton.constexpr_function
def tuple_of(*items):
    """The items as one compile-time tuple."""
    return items


@triton.constexpr_function
def interpreted_int(n):
    """A scalar of the interpreter as a Python int; loops over it need that there.

    ``range(0, interpreted_int(n) if INTERPRET else n)``: compiled loops take the scalar itself.
    """
    return int(n.handle.data.item())


@triton.jit
def twin_lanes(first_row, lift, ROWS: tl.constexpr):
    """Tile row, row in the tile and lift of the lanes of two matrices, [1, 2 * ROWS]."""
    lane = tl.arange(0, 2 * ROWS)[None, :]
    tr = first_row // 16 + lane // 16 % (ROWS // 16)
    lift = lane // ROWS * lift
    return tr, lane % 16, lift


@triton.jit
def twins_apart(both, ROWS: tl.constexpr):
    """Every token's rows of the first matrix, then of the second."""
    first = ()
    second = ()
    for t in tl.static_range(len(both)):
        a, b = tl.split(tl.trans(tl.reshape(both[t], (2, ROWS)), (1, 0)))
        first = first + (a,)
        second = second + (b,)
    return first + second
