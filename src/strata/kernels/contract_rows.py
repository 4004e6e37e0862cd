# mypy: allow-untyped-defs, allow-untyped-decorators
"""Float rows times tokens in the order of the numerics contract, section 4, as a device function.

32 partial sums by k mod 32, ascending, then halves folded: the order of the CPU's rows. Expert rows
need it, because a row may be computed by either. Dense rows of a GPU use ``float_product``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.triton_common import fma


@triton.jit
def _fold_halves(p, ROWS: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr):
    """[ROWS, TOKENS, N] -> [ROWS, TOKENS]: the upper half is added to the lower one, N times."""
    if N == 1:
        y = tl.reshape(p, (ROWS, TOKENS))
    else:
        HALF: tl.constexpr = N // 2
        both = tl.reshape(p, (ROWS, TOKENS, 2, HALF))
        y = _fold_halves(tl.sum(both, axis=2), ROWS, TOKENS, HALF)
    return y


@triton.jit
def contract_products(M: tl.constexpr, base, first_row, x, ROWS: tl.constexpr):
    """Rows first_row .. + ROWS - 1 of a FloatMatrix times every token: a tuple of f32 [ROWS].

    base: int64 address. x: a tuple of f32 pointers, one a token. Rows beyond the last repeat it.
    """
    K: tl.constexpr = M.n_cols
    TOKENS: tl.constexpr = triton.next_power_of_2(len(x))
    if M.dtype == "BF16":
        rows = base.to(tl.pointer_type(tl.bfloat16))
    elif M.dtype == "F16":
        rows = base.to(tl.pointer_type(tl.float16))
    else:
        rows = base.to(tl.pointer_type(tl.float32))
    row = tl.minimum(first_row + tl.arange(0, ROWS), M.n_rows - 1).to(tl.int64)
    at = rows + row[:, None, None] * K
    t = tl.arange(0, TOKENS)
    address = tl.zeros((TOKENS,), tl.int64) + x[0].to(tl.int64)
    for i in tl.static_range(1, len(x)):
        address = tl.where(t == i, x[i].to(tl.int64), address)
    tokens = address.to(tl.pointer_type(tl.float32))[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    p = tl.zeros((ROWS, TOKENS, 32), tl.float32)
    for k0 in range(0, K, 32):
        ok = k0 + lane < K
        w = tl.load(at + k0 + lane, mask=ok, other=0.0).to(tl.float32)
        x_k = tl.load(tokens + k0 + lane, mask=ok, other=0.0)
        p = fma(tl.broadcast_to(w, p.shape), tl.broadcast_to(x_k, p.shape), p)
    bits = _fold_halves(p, ROWS, TOKENS, 32).to(tl.int32, bitcast=True)
    y = ()
    for i in tl.static_range(len(x)):
        # by bits, so that -0 stays what it is
        one = tl.sum(tl.where(t[None, :] == i, bits, 0), axis=1)
        y = y + (one.to(tl.float32, bitcast=True),)
    return y
