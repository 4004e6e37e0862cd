# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products of up to 8 tokens with weights on the GPU; one launch for all matrices of an input, but
one more for each that has few long rows (``triton_long``).

Tiles: bit-equal to ``ref.linear_contract``. Float rows: f32 in the order of ``float_product``.
Every weight is read once for all tokens, and no token's bits depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from strata.kernels.float_product import float_product, load_rows
from strata.kernels.gpu_matrix import matrix_of
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.launch import MOST_TOKENS, Tuning, make_parts, room_bytes, tune
from strata.kernels.linear.triton_long import is_long, linear_long
from strata.kernels.quantize.ref import Quantized
from strata.kernels.tile_product import tile_products
from strata.kernels.tile_spread import spread_products
from strata.kernels.triton_common import EXACT, INTERPRET, pick, tuple_of
from strata.kernels.triton_shared import shared_room


@triton.jit
def _choose(values, FIRST: tl.constexpr, COUNT: tl.constexpr, n):
    """values[FIRST + n] for n < COUNT, n known only at run time."""
    value = values[FIRST]
    for i in tl.static_range(1, COUNT):
        value = tl.where(n == i, values[FIRST + i], value)
    return value


@triton.jit
def _row_products(P: tl.constexpr, base, first_row, x, q, meta, room):
    """Some rows of a matrix times every token: a tuple of f32 [P.rows]."""
    M: tl.constexpr = P.matrix
    ROWS: tl.constexpr = P.rows
    SPREAD: tl.constexpr = P.spread
    if SPREAD is not None:
        y = spread_products(M, SPREAD, base, room, first_row, q, meta, P.narrow)
    elif P.is_tiles:
        y = tile_products(tuple_of(M), (base,), first_row, q, meta, ROWS, P.stages, P.narrow)
    else:
        steps = load_rows(M, base, first_row, ROWS)
        y = ()
        for t in tl.static_range(len(x)):
            y = y + (float_product(M, steps, x[t], ROWS),)
    return y


@triton.jit
def _run_part(P: tl.constexpr, STRIDES: tl.constexpr, x, q, meta, weights, outs, scales, room):
    """Programs of other parts do nothing."""
    FIRST: tl.constexpr = P.first
    COUNT: tl.constexpr = P.count
    ROWS: tl.constexpr = P.rows
    pid = tl.program_id(0) - P.start
    if (pid >= 0) & (pid < COUNT * P.programs):
        n = pid // P.programs
        first_row = (pid % P.programs) * ROWS
        y = _row_products(P, _choose(weights, FIRST, COUNT, n), first_row, x, q, meta, room)
        row = first_row + tl.arange(0, ROWS)
        out = _choose(outs, FIRST, COUNT, n).to(tl.pointer_type(tl.float32))
        for t in tl.static_range(len(y)):
            y_t = y[t]
            if P.scaled:
                y_t = y_t * _choose(scales, FIRST, COUNT, n)
            tl.store(out + t * pick(STRIDES, FIRST) + row, y_t, mask=row < P.matrix.n_rows)


@triton.jit
def linear_kernel(
    x, q, meta, weights, outs, scales,
    T: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    PARTS: tl.constexpr, STRIDES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Program p computes rows of the part that it belongs to, for all T tokens."""
    room = 0
    if ROOM > 0 and not INTERPRET:
        room = shared_room(ROOM)
    xs = ()
    qs = ()
    metas = ()
    for t in tl.static_range(T):
        xs = xs + (x + t * K,)
        qs = qs + (q + t * SLOTS * 32,)
        metas = metas + (meta + t * SLOTS * 2,)
    for i in tl.static_range(len(PARTS)):
        _run_part(pick(PARTS, i), STRIDES, xs, qs, metas, weights, outs, scales, room)


def linear(
    weights: Sequence[GpuWeight],
    outs: Sequence[torch.Tensor],
    x_TK: torch.Tensor | None,
    x_q: Quantized | None,
    tuning: Tuning | None = None,
) -> None:
    """outs[i][t] = weights[i] x[t] for every token.

    weights: matrices [N_i, K] of one device, best with equal shapes and types side by side. outs:
    f32 [T, N_i], each row contiguous. x_TK: f32 [T, K], contiguous, on a multiple of 16 bytes; it
    may be None when every weight is tiles. x_q: the same activations (kernels/quantize); None when
    no weight is tiles.
    """
    n_tokens, n_cols = len(outs[0]), weights[0].n_cols
    _check(weights, outs, x_TK, x_q, n_tokens, n_cols)
    if tuning is None:
        for w, out in zip(weights, outs, strict=True):
            if is_long(w):
                assert x_q is not None, "x_q"
                linear_long(w, out, x_q)
        outs = [out for w, out in zip(weights, outs, strict=True) if not is_long(w)]
        weights = [w for w in weights if not is_long(w)]
        if not weights:
            return
    tuning = tuning or tune([matrix_of(w) for w in weights], n_tokens)
    parts = make_parts(weights, tuning, n_tokens)
    strides = tuple(out.stride(0) for out in outs)
    for part in parts:
        same = strides[part.first : part.first + part.count]
        assert len(set(same)) == 1, f"outputs of equal matrices need equal strides, got {same}"
    x = outs[0] if x_TK is None else x_TK
    q, meta, slots = (x, x, 0) if x_q is None else (x_q.q, x_q.meta, x_q.q.shape[1])
    linear_kernel[(parts[-1].end,)](
        x,
        q,
        meta,
        tuple(w.data.data_ptr() for w in weights),
        tuple(out.data_ptr() for out in outs),
        tuple(w.scale for w in weights),
        T=n_tokens,
        K=n_cols,
        SLOTS=slots,
        PARTS=parts,
        STRIDES=strides,
        ROOM=room_bytes(parts, n_tokens),
        num_warps=tuning.warps,
        **EXACT,
    )


def _check(
    weights: Sequence[GpuWeight],
    outs: Sequence[torch.Tensor],
    x_TK: torch.Tensor | None,
    x_q: Quantized | None,
    n_tokens: int,
    n_cols: int,
) -> None:
    """Shapes that do not fit are our own mistake."""
    assert 1 <= n_tokens <= MOST_TOKENS, f"{n_tokens} tokens, at most {MOST_TOKENS}"
    for w, out in zip(weights, outs, strict=True):
        assert w.n_cols == n_cols, f"matrices of {w.n_cols} and {n_cols} columns in one launch"
        assert tuple(out.shape) == (n_tokens, w.n_rows), (tuple(out.shape), n_tokens, w.n_rows)
        assert out.dtype == torch.float32 and out.stride(1) == 1, "outputs are f32 rows"
        assert w.data.data_ptr() % 16 == 0, "weights begin on a multiple of 16 bytes"
    if any(w.is_tiles for w in weights):
        assert x_q is not None and x_q.n_cols == n_cols and x_q.n_rows >= n_tokens, "x_q"
    if not all(w.is_tiles for w in weights):
        assert x_TK is not None and tuple(x_TK.shape) == (n_tokens, n_cols), "x_TK"
        assert x_TK.is_contiguous() and x_TK.data_ptr() % 16 == 0, "x is contiguous and aligned"
