# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products with float rows inside Triton programs: f32 activations, one fixed order of sums.

Knows no grids and no outputs. A row has LANES partial sums (a power of two, a function of its width
alone) that start at +0; lane j adds k = j, j + LANES, ... ascending by fma. Then neighbours are
added, (p[0] + p[1]), (p[2] + p[3]), ..., until one sum is left. So a token's result depends neither
on the other tokens nor on their number. These are not the 32 lanes of contract 4, which would leave
most of a GPU idle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.triton_common import fma, load_words4, opaque_zero


@triton.jit
def _typed(M: tl.constexpr, address):
    """The address as a pointer to elements."""
    if M.dtype == "BF16":
        return address.to(tl.pointer_type(tl.bfloat16))
    elif M.dtype == "F16":
        return address.to(tl.pointer_type(tl.float16))
    else:
        return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _as_floats(words):
    """int32 words as f32; f32 stays."""
    values = ()
    for i in tl.static_range(len(words)):
        values = values + (words[i].to(tl.float32, bitcast=True),)
    return values


@triton.jit
def _widen(M: tl.constexpr, words):
    """The elements of some words as f32, in order; a single element is widened as it is."""
    values = ()
    if M.vector == 1:
        values = values + (words[0].to(tl.float32),)
    elif M.dtype == "F32":
        values = _as_floats(words)
    else:
        for i in tl.static_range(len(words)):
            if M.dtype == "BF16":
                low = (words[i] << 16).to(tl.float32, bitcast=True)
                high = (words[i] & -65536).to(tl.float32, bitcast=True)
            else:
                low = words[i].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                high = (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            values = values + (low, high)
    return values


@triton.jit
def _only(words, ok):
    """The words where ok, elsewhere 0."""
    kept = ()
    for i in tl.static_range(len(words)):
        kept = kept + (tl.where(ok, words[i], 0),)
    return kept


@triton.jit
def load_rows(M: tl.constexpr, base, first_row, ROWS: tl.constexpr):
    """Rows first_row .. + ROWS - 1, unconverted: one tuple of [ROWS, lanes / vector] a step.

    base: int64 address, a multiple of 16. Rows beyond the last repeat it.
    """
    STEPS: tl.constexpr = (M.n_cols + M.lanes - 1) // M.lanes
    VECTOR: tl.constexpr = M.vector
    lane = tl.arange(0, M.lanes // VECTOR)[None, :]
    row = tl.minimum(first_row + tl.arange(0, ROWS), M.n_rows - 1)[:, None]
    start = row.to(tl.int64) * M.n_cols
    steps = ()
    for c in tl.static_range(STEPS):
        k = lane * VECTOR + c * M.lanes
        ok = k < M.n_cols
        if VECTOR == 1:
            words = (tl.load(_typed(M, base) + start + k, mask=ok, other=0.0),)
        elif (c + 1) * M.lanes <= M.n_cols:
            words = load_words4(base + (start + k) * (16 // VECTOR))
        else:
            k = tl.where(ok, k, 0)
            words = load_words4(base + (start + k) * (16 // VECTOR))
            words = _only(words, ok)
        steps = steps + (words,)
    return _all_at_once(steps)


@triton.jit
def _all_at_once(steps):
    """The same words, of which none can be used before all are loaded.

    The assembler would move loads down to their uses to save registers, which leaves too few bytes
    in flight. Every sum begins with step 0, so a zero made of all the others is put into step 0.
    """
    if len(steps) == 1 or len(steps[0]) == 1:
        return steps
    else:
        seen = steps[1][0]
        for c in tl.static_range(2, len(steps)):
            seen = seen | steps[c][0]
        zero = seen & opaque_zero()
        first = ()
        for i in tl.static_range(len(steps[0])):
            first = first + (steps[0][i] | zero,)
        return (first,) + steps[1:]


@triton.jit
def _load_x(M: tl.constexpr, x, c: tl.constexpr):
    """Step c of one token: as many words [1, lanes / vector] as a lane has columns."""
    VECTOR: tl.constexpr = M.vector
    k = tl.arange(0, M.lanes // VECTOR)[None, :] * VECTOR + c * M.lanes
    ok = k < M.n_cols
    if VECTOR == 1:
        words = (tl.load(x + k, mask=ok, other=0.0),)
    else:
        if (c + 1) * M.lanes > M.n_cols:
            k = tl.where(ok, k, 0)
        address = x.to(tl.int64) + k * 4
        words = load_words4(address)
        if VECTOR == 8:
            words = words + load_words4(address + 16)
    return words


@triton.jit
def _fold(p, ROWS: tl.constexpr, N: tl.constexpr):
    """[ROWS, N] -> [ROWS]: neighbours are added until one is left, by sums of two."""
    if N == 1:
        y = tl.reshape(p, (ROWS,))
    else:
        HALF: tl.constexpr = N // 2
        y = _fold(tl.sum(tl.reshape(p, (ROWS, HALF, 2)), axis=2), ROWS, HALF)
    return y


@triton.jit
def float_product(M: tl.constexpr, steps, x, ROWS: tl.constexpr):
    """The loaded rows times one token, f32 [ROWS]. x: f32 pointer, a multiple of 16."""
    VECTOR: tl.constexpr = M.vector
    LANES: tl.constexpr = M.lanes // VECTOR
    p = ()
    for _ in tl.static_range(VECTOR):
        p = p + (tl.zeros((ROWS, LANES), tl.float32),)
    x_steps = ()
    for c in tl.static_range(len(steps)):
        x_steps = x_steps + (_load_x(M, x, c),)
    x_steps = _all_at_once(x_steps)
    for c in tl.static_range(len(steps)):
        w = _widen(M, steps[c])
        x_k = _as_floats(x_steps[c])
        new = ()
        for e in tl.static_range(VECTOR):
            new = new + (fma(w[e], x_k[e], p[e]),)
        p = new
    if VECTOR == 8:
        y = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    elif VECTOR == 4:
        y = (p[0] + p[1]) + (p[2] + p[3])
    else:
        y = p[0]
    return _fold(y, ROWS, LANES)
