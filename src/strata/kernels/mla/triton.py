# mypy: allow-untyped-defs, allow-untyped-decorators
"""Latent attention on the GPU in three launches: rows and queries, split attention, values.

``append`` puts the window's rows into the cache and absorbs its queries; ``attend`` goes over the
cache in SPLITS runs per token (positions are read on the device, as in kernels/attention), then
joins the runs and applies v_b. A cached number is read once for keys and values. k_b and v_b are
[H * n, c] float rows or tiles, multiplied as f32 numbers; every head's matrix is read once for all
tokens of the window, whose sums have one order for every T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.attention.triton import Scratch, f32_dot, powers
from strata.kernels.gpu_matrix import matrix_of
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.launch import MOST_TOKENS
from strata.kernels.pointwise.triton import quantized_args, quantized_slots
from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import store_blocks
from strata.kernels.rms_norm.triton import inverse_rms
from strata.kernels.rotary.triton import RotaryTable, partner_of, rotated
from strata.kernels.tile_values import matrix_values
from strata.kernels.triton_common import EXACT, INTERPRET, interpreted_int

_HEADS = tl.constexpr(16)
_SPREAD = tl.constexpr(1024.0)
_COLS = 64
"""Latent columns of a program of absorbed queries, and of a step of the values."""


@triton.jit
def _rotated_part(
    x, p, turns, factor, R: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr
):
    """R numbers at x, rotated by position p: f32 [BLOCK]."""
    i = tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < R, other=0.0)
    other = tl.load(x + partner_of(i, N, PAIRS), mask=i < R, other=0.0)
    return rotated(y, other, i, p, turns, factor, N, PAIRS)


@triton.jit
def _append_row(
    x, norm, p, entry, eps, turns, factor, C: tl.constexpr, R: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token's projected row x into the cache's entry."""
    i = tl.arange(0, BLOCK_C)
    latent = tl.load(x + i, mask=i < C, other=0.0)
    y = latent * inverse_rms(latent, C, eps) * tl.load(norm + i, mask=i < C, other=0.0)
    tl.store(entry + i, y.to(entry.dtype.element_ty), mask=i < C)
    rope = _rotated_part(x + C, p, turns, factor, R, BLOCK_R, N, PAIRS)
    i_r = tl.arange(0, BLOCK_R)
    tl.store(entry + C + i_r, rope.to(entry.dtype.element_ty), mask=i_r < R)


@triton.jit
def _absorb(
    q, k_b, scale, pos, out, turns, factor, h, c0,
    M: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    COLS: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns c0 and up of head h's queries; with the first ones also the rotated part."""
    i = tl.arange(0, BLOCK_P)
    i_r = tl.arange(0, BLOCK_R)
    w_PC = matrix_values(M, TILES, k_b, h * P + i, c0, COLS)
    w_PC = tl.where(i[:, None] < P, w_PC, 0.0)
    c = c0 + tl.arange(0, COLS)
    for t in tl.static_range(T):
        head = t * H + h
        at = q + head * (P + R)
        x = tl.load(at + i, mask=i < P, other=0.0)
        y = tl.sum(w_PC * x[:, None], axis=0) * scale
        tl.store(out + head * (C + R) + c, y, mask=c < C)
        if c0 == 0:
            p = tl.load(pos + t)
            rope = _rotated_part(at + P, p, turns, factor, R, BLOCK_R, N, PAIRS)
            tl.store(out + head * (C + R) + C + i_r, rope, mask=i_r < R)


@triton.jit
def append_kernel(
    row, norm, q, k_b, scale, pos, cache, out, eps, turns, factor, ROW_STRIDE, CACHE_STRIDE,
    M: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, COLS: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Programs below T: the row of a token. The others: COLS columns of the queries of one head."""
    CHUNKS: tl.constexpr = (C + COLS - 1) // COLS
    pid = tl.program_id(0)
    if pid < T:
        p = tl.load(pos + pid)
        entry = cache + p.to(tl.int64) * CACHE_STRIDE
        _append_row(
            row + pid * ROW_STRIDE, norm, p, entry, eps, turns, factor, C, R, BLOCK_C, BLOCK_R, N,
            PAIRS,
        )  # fmt: skip
    else:
        h = (pid - T) // CHUNKS
        c0 = (pid - T) % CHUNKS * COLS
        _absorb(
            q, k_b, scale, pos, out, turns, factor, h, c0, M, TILES, T, H, C, R, P, BLOCK_R,
            BLOCK_P, COLS, N, PAIRS,
        )  # fmt: skip


@triton.jit
def partial_kernel(
    q, cache, pos, top_out, sum_out, out, scale, CACHE_STRIDE,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (t, s, b): run s of token t's positions, 16 heads."""
    t = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.program_id(2) * _HEADS + tl.arange(0, _HEADS)
    ok_m = (m < H)[:, None]
    head = t * H + m
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    n = tl.load(pos + t) + 1
    chunks = (n + BLOCK_N - 1) // BLOCK_N
    run = (chunks + SPLITS - 1) // SPLITS * BLOCK_N
    begin = split * run
    end = tl.minimum(begin + run, n)
    at = q + head[:, None] * (C + R)
    q_MC = tl.load(at + c[None, :], mask=ok_m & (c < C)[None, :], other=0.0)
    q_MR = tl.load(at + C + r[None, :], mask=ok_m & (r < R)[None, :], other=0.0)
    power_c, inverse = powers(q_MC)
    q_MC = q_MC * inverse[:, None]
    power_r, inverse = powers(q_MR)
    q_MR = q_MR * inverse[:, None]
    top = tl.full((_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((_HEADS,), tl.float32)
    acc = tl.zeros((_HEADS, BLOCK_C), tl.float32)
    for i0 in range(
        interpreted_int(begin) if INTERPRET else begin,
        interpreted_int(end) if INTERPRET else end,
        BLOCK_N,
    ):
        i = i0 + tl.arange(0, BLOCK_N)
        ok = (i < end)[:, None]
        entry = cache + i[:, None].to(tl.int64) * CACHE_STRIDE
        latent_NC = tl.load(entry + c[None, :], mask=ok & (c < C)[None, :], other=0.0)
        rope_NR = tl.load(entry + C + r[None, :], mask=ok & (r < R)[None, :], other=0.0)
        score = f32_dot(q_MC, tl.trans(latent_NC)) * power_c[:, None]
        score += f32_dot(q_MR, tl.trans(rope_NR)) * power_r[:, None]
        score = tl.where((i < end)[None, :], score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - new_top)
        e = tl.exp(score - new_top[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        acc = acc * shrink[:, None] + f32_dot(e * _SPREAD, latent_NC)
        top = new_top
    at = head * SPLITS + split
    tl.store(top_out + at, top, mask=m < H)
    tl.store(sum_out + at, total, mask=m < H)
    ok = ok_m & (c < C)[None, :] & (begin < end)
    tl.store(out + at[:, None] * C + c[None, :], acc * (1 / _SPREAD), mask=ok)


@triton.jit
def _run_weights(top_in, sum_in, head, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """What each run of a head counts, f32 [BLOCK_S]; runs without a position count 0."""
    s = tl.arange(0, BLOCK_S)
    at = head * SPLITS + s
    top_S = tl.load(top_in + at, mask=s < SPLITS, other=float("-inf"))
    sum_S = tl.load(sum_in + at, mask=s < SPLITS, other=0.0)
    used = (s < SPLITS) & (top_S > float("-inf"))
    weight_S = tl.where(used, tl.exp(top_S - tl.max(top_S, axis=0)), 0.0)
    return weight_S / tl.sum(tl.where(used, weight_S * sum_S, 0.0), axis=0)


@triton.jit
def _store_values(
    y, h, v, out, q_row, meta_row, H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Dims v [ROWS] of head h of one token, as floats and as int8."""
    tl.store(out + v, y, mask=v < V)
    if QUANTIZE:
        N: tl.constexpr = ROWS // 32
        BLOCKS: tl.constexpr = V // 32
        block = tl.program_id(1) * N + tl.arange(0, N)
        values = tl.reshape(y, (N, 32))
        store_blocks(values, h * BLOCKS + block, block < BLOCKS, q_row, meta_row, H * BLOCKS, N)


@triton.jit
def value_kernel(
    top_in, sum_in, part, v_b, scale, out, q, meta,
    M: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program (h, p): ROWS value dims of head h for all tokens."""
    h = tl.program_id(0)
    v = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, BLOCK_S)[:, None]
    weights = ()
    acc = ()
    for t in tl.static_range(T):
        weights = weights + (_run_weights(top_in, sum_in, t * H + h, SPLITS, BLOCK_S)[:, None],)
        acc = acc + (tl.zeros((ROWS,), tl.float32),)
    for c0 in range(0, C, COLS):
        w_VC = matrix_values(M, TILES, v_b, h * V + v, c0, COLS)
        w_VC = tl.where(v[:, None] < V, w_VC, 0.0)
        c = c0 + tl.arange(0, COLS)[None, :]
        new = ()
        for t in tl.static_range(T):
            ok = (s < SPLITS) & (weights[t] > 0) & (c < C)
            at = part + ((t * H + h) * SPLITS + s) * C + c
            mixed = tl.sum(weights[t] * tl.load(at, mask=ok, other=0.0), axis=0)
            new = new + (acc[t] + tl.sum(w_VC * mixed[None, :], axis=1),)
        acc = new
    for t in tl.static_range(T):
        _store_values(
            acc[t] * scale, h, v, out + (t * H + h) * V, q + t * SLOTS * 32, meta + t * SLOTS * 2,
            H, V, ROWS, QUANTIZE,
        )  # fmt: skip


def append(
    row_TN: torch.Tensor,
    norm_c: torch.Tensor,
    q_THd: torch.Tensor,
    k_b: GpuWeight,
    pos_T: torch.Tensor,
    cache_nN: torch.Tensor,
    absorbed_THN: torch.Tensor,
    eps: float,
    table: RotaryTable,
) -> None:
    """The window's rows into the cache, its queries absorbed. One launch.

    row_TN: f32 [T, c + r], row stride free. norm_c: f32. q_THd: f32 [T, H, p + r], contiguous. k_b:
    [H * p, c]. pos_T: int32 [T]. cache_nN: f16 or f32 [context, c + r], row stride free.
    absorbed_THN: f32 [T, H, c + r], contiguous.
    """
    (n_tokens, n_heads, width), rank = q_THd.shape, len(norm_c)
    rope = cache_nN.shape[1] - rank
    assert n_tokens <= MOST_TOKENS and q_THd.is_contiguous(), tuple(q_THd.shape)
    assert (k_b.n_rows, k_b.n_cols) == (n_heads * (width - rope), rank), (k_b.n_rows, k_b.n_cols)
    assert tuple(absorbed_THN.shape) == (n_tokens, n_heads, rank + rope), absorbed_THN.shape
    cols = min(_COLS, triton.next_power_of_2(rank))
    append_kernel[(n_tokens + n_heads * triton.cdiv(rank, cols),)](
        row_TN, norm_c, q_THd, k_b.data.data_ptr(), k_b.scale, pos_T, cache_nN, absorbed_THN, eps,
        table.turns_n, table.factor, row_TN.stride(0), cache_nN.stride(0),
        M=matrix_of(k_b), TILES=k_b.is_tiles, T=n_tokens, H=n_heads, C=rank, R=rope,
        P=width - rope, BLOCK_C=triton.next_power_of_2(rank),
        BLOCK_R=triton.next_power_of_2(rope), BLOCK_P=triton.next_power_of_2(width - rope),
        COLS=cols, N=table.n, PAIRS=table.pairs, num_warps=4, **EXACT,
    )  # fmt: skip


def attend(
    absorbed_THN: torch.Tensor,
    cache_nN: torch.Tensor,
    v_b: GpuWeight,
    pos_T: torch.Tensor,
    scale: float,
    scratch: Scratch,
    out_THv: torch.Tensor,
    *,
    quantized: Quantized | None = None,
    chunk: int = 32,
) -> None:
    """out[t, h] = v_b[h] of the attention of absorbed queries over the cache. Two launches.

    v_b: [H * v, c]. scratch: ``attention.triton.new_scratch`` with v_dim = c. out_THv: f32,
    contiguous; quantized: the same as int8 rows of H * v columns. chunk: positions at once.
    """
    (n_tokens, n_heads, width), v_dim = absorbed_THN.shape, out_THv.shape[2]
    rank, n_splits = v_b.n_cols, scratch.max_THS.shape[2]
    assert scratch.max_THS.shape[1] == n_heads and scratch.out_THSv.shape[3] == rank, "scratch"
    assert v_b.n_rows == n_heads * v_dim and cache_nN.shape[1] == width, (v_b.n_rows, v_dim)
    assert quantized is None or v_dim % 32 == 0, f"{v_dim} is not whole blocks of 32"
    rope = width - rank
    partial_kernel[(n_tokens, n_splits, triton.cdiv(n_heads, 16))](
        absorbed_THN, cache_nN, pos_T, scratch.max_THS, scratch.sum_THS, scratch.out_THSv, scale,
        cache_nN.stride(0), H=n_heads, C=rank, R=rope,
        BLOCK_C=max(16, triton.next_power_of_2(rank)),
        BLOCK_R=max(16, triton.next_power_of_2(rope)), BLOCK_N=chunk, SPLITS=n_splits,
        num_warps=8 if rank > 256 else 4, num_stages=2, **EXACT,
    )  # fmt: skip
    rows = min(64, max(32, triton.next_power_of_2(v_dim)))
    value_kernel[(n_heads, triton.cdiv(v_dim, rows))](
        scratch.max_THS, scratch.sum_THS, scratch.out_THSv, v_b.data.data_ptr(), v_b.scale,
        out_THv, *quantized_args(quantized, out_THv), M=matrix_of(v_b), TILES=v_b.is_tiles,
        T=n_tokens, H=n_heads, C=rank, V=v_dim, ROWS=rows,
        COLS=min(_COLS, triton.next_power_of_2(rank)), SPLITS=n_splits,
        BLOCK_S=triton.next_power_of_2(n_splits), SLOTS=quantized_slots(quantized),
        QUANTIZE=quantized is not None, num_warps=8, **EXACT,
    )  # fmt: skip
