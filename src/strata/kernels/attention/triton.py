# mypy: allow-untyped-defs, allow-untyped-decorators
"""Attention of a window's tokens over the cache on the GPU: split, then joined, in two launches.

What a token sees is a list of positions in ascending order: all up to its own, the last
``window_tokens`` of them, or the tokens of its selected blocks and the incomplete block behind them
(kernels/qsa). The list is cut into SPLITS equal runs of whole chunks. Program (t, s, b) goes over
run s of token t with up to 16 query heads of one key/value head, keeping a running maximum; the
second launch joins the runs in order, adds the sinks, applies the gate, and quantizes.

The number of programs is fixed and positions are read on the device, so one recording serves every
length. The runs depend on the token's own position alone, so its bits do not depend on T. Products
are nearly those of f32: f16 numbers of the cache times f32 numbers cut into two f16 halves (2^-22),
or three TF32 products where the cache is f32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.kv_quant.triton import KvScales, kv_args, load_vectors
from strata.kernels.pointwise.triton import quantized_args, quantized_slots, sigmoid
from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import store_blocks
from strata.kernels.triton_common import EXACT, INTERPRET, interpreted_int

_HEADS = tl.constexpr(16)
"""Query heads of a program: the smallest side of a matrix instruction."""
_SPREAD = tl.constexpr(1024.0)
"""Probabilities times this keep more bits as two f16 halves."""


@dataclass(frozen=True)
class Selection:
    """Blocks that tokens kept (kernels/qsa). blocks_Tm: int32 [T, budget], ascending; a token whose
    complete blocks fit the budget sees them all and its row is not read."""

    blocks_Tm: torch.Tensor
    block_tokens: int


@dataclass(frozen=True)
class Scratch:
    """Partial results: max_THS and sum_THS f32 [T, H, splits], out_THSv f32 [T, H, splits, dv]."""

    max_THS: torch.Tensor
    sum_THS: torch.Tensor
    out_THSv: torch.Tensor


def new_scratch(
    n_tokens: int, n_heads: int, n_splits: int, v_dim: int, device: torch.device | str
) -> Scratch:
    """Memory for windows of up to n_tokens; layers may share it."""
    shape = (n_tokens, n_heads, n_splits)
    return Scratch(
        torch.empty(shape, device=device),
        torch.empty(shape, device=device),
        torch.empty((*shape, v_dim), device=device),
    )


@triton.jit
def f32_dot(a, b):
    """a f32 [16, K] times b f16 or f32 [K, N]; with f16, |a| should lie around 1 to 1000."""
    if b.dtype == tl.float16:
        high = a.to(tl.float16)
        low = (a - high.to(tl.float32)).to(tl.float16)
        y = tl.dot(low, b) + tl.dot(high, b)
    else:
        y = tl.dot(a, b, input_precision="tf32x3")
    return y


@triton.jit
def powers(x):
    """Per row of x: the power of two at or below its largest number, and one over that."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x0D800000), 0x71800000)  # 2^-100 .. 2^100
    inverse = (254 << 23) - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _span(p, WINDOW: tl.constexpr, R: tl.constexpr, BUDGET: tl.constexpr):
    """(first position, length of the list, complete blocks if they are selected among, else 0)."""
    n = p + 1
    first = p * 0
    blocks = p * 0
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW, 0)
    if BUDGET > 0:
        blocks = n // R
        blocks = tl.where(blocks > BUDGET, blocks, 0)
        n = tl.where(blocks > 0, BUDGET * R + n % R, n)
    return first, n - first, blocks


@triton.jit
def _positions(i, ok, kept, first, blocks, R: tl.constexpr, BUDGET: tl.constexpr):
    """Entries i of the list."""
    j = first + i
    if BUDGET > 0:
        listed = (blocks > 0) & (i < BUDGET * R)
        block = tl.load(kept + i // R, mask=ok & listed, other=0)
        tail = tl.where(blocks > 0, (blocks - BUDGET) * R + i, j)
        j = tl.where(listed, block * R + i % R, tail)
    return j


@triton.jit
def partial_kernel(
    q, k, v, k_scale, v_scale, kept, pos, top_out, sum_out, out, scale, K_STRIDE, V_STRIDE,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    R: tl.constexpr, BUDGET: tl.constexpr, BITS: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
):  # fmt: skip
    """K_STRIDE, V_STRIDE: numbers between positions. BUDGET: selected blocks, 0 = no selection."""
    M: tl.constexpr = H // G
    PER_GROUP: tl.constexpr = (M + _HEADS - 1) // _HEADS
    t = tl.program_id(0)
    split = tl.program_id(1)
    g = tl.program_id(2) // PER_GROUP
    m = (tl.program_id(2) % PER_GROUP) * _HEADS + tl.arange(0, _HEADS)
    ok_m = m < M
    head = t * H + g * M + m
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    first, n, blocks = _span(tl.load(pos + t), WINDOW, R, BUDGET)
    chunks = (n + BLOCK_N - 1) // BLOCK_N
    run = (chunks + SPLITS - 1) // SPLITS * BLOCK_N
    begin = split * run
    end = tl.minimum(begin + run, n)
    q_MD = tl.load(
        q + head[:, None] * D + d[None, :], mask=ok_m[:, None] & (d < D)[None, :], other=0.0
    )
    power, inverse = powers(q_MD)
    q_MD = q_MD * inverse[:, None]
    power = power * scale
    top = tl.full((_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((_HEADS,), tl.float32)
    acc = tl.zeros((_HEADS, BLOCK_V), tl.float32)
    for i0 in range(
        interpreted_int(begin) if INTERPRET else begin,
        interpreted_int(end) if INTERPRET else end,
        BLOCK_N,
    ):
        i = i0 + tl.arange(0, BLOCK_N)
        ok = i < end
        j = _positions(i, ok, kept + t * BUDGET, first, blocks, R, BUDGET).to(tl.int64)
        at = g * D + j * K_STRIDE
        k_ND = load_vectors(k, k_scale, j * G + g, at, ok, D, BLOCK_D, BITS, K_GROUP)
        at = g * DV + j * V_STRIDE
        v_NV = load_vectors(v, v_scale, j * G + g, at, ok, DV, BLOCK_V, BITS, V_GROUP)
        score = f32_dot(q_MD, tl.trans(k_ND)) * power[:, None]
        score = tl.where(ok[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - new_top)
        e = tl.exp(score - new_top[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        acc = acc * shrink[:, None] + f32_dot(e * _SPREAD, v_NV)
        top = new_top
    at = head * SPLITS + split
    tl.store(top_out + at, top, mask=ok_m)
    tl.store(sum_out + at, total, mask=ok_m)
    ok = ok_m[:, None] & (dv < DV)[None, :] & (begin < end)
    tl.store(out + at[:, None] * DV + dv[None, :], acc * (1 / _SPREAD), mask=ok)


@triton.jit
def join_kernel(
    top_in, sum_in, part, sinks, gate, out, q, meta, GATE_STRIDE,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr, GATE_HEAD: tl.constexpr,
    SLOTS: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program (t, h). Runs without a position have maximum -inf and are left out."""
    t = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_V)
    at = (t * H + h) * SPLITS + s
    top_S = tl.load(top_in + at, mask=s < SPLITS, other=float("-inf"))
    sum_S = tl.load(sum_in + at, mask=s < SPLITS, other=0.0)
    used = (s < SPLITS) & (top_S > float("-inf"))
    ok = used[:, None] & (dv < DV)[None, :]
    part_SV = tl.load(part + at[:, None] * DV + dv[None, :], mask=ok, other=0.0)
    top = tl.max(top_S, axis=0)
    if SINKS:
        sink = tl.load(sinks + h)
        top = tl.maximum(top, sink)
    weight_S = tl.where(used, tl.exp(top_S - top), 0.0)
    total = tl.sum(weight_S * sum_S, axis=0)
    if SINKS:
        total += tl.exp(sink - top)
    y = tl.sum(weight_S[:, None] * part_SV, axis=0) / total
    if GATE:
        g = tl.load(gate + t * GATE_STRIDE + h * GATE_HEAD + dv, mask=dv < DV, other=0.0)
        y = y * sigmoid(g)
    tl.store(out + (t * H + h) * DV + dv, y, mask=dv < DV)
    if QUANTIZE:
        n: tl.constexpr = BLOCK_V // 32
        blocks: tl.constexpr = DV // 32
        block = tl.arange(0, n)
        store_blocks(
            tl.reshape(y, (n, 32)), h * blocks + block, block < blocks,
            q + t * SLOTS * 32, meta + t * SLOTS * 2, H * blocks, n,
        )  # fmt: skip


def attention(
    q_THd: torch.Tensor,
    k_nGd: torch.Tensor,
    v_nGv: torch.Tensor,
    pos_T: torch.Tensor,
    scale: float,
    scratch: Scratch,
    out_THv: torch.Tensor,
    *,
    window_tokens: int | None = None,
    sinks_H: torch.Tensor | None = None,
    selection: Selection | None = None,
    gate: tuple[torch.Tensor, int] | None = None,
    quantized: Quantized | None = None,
    chunk: int | None = None,
    scales: KvScales | None = None,
) -> None:
    """out[t, h] of the contract in the package docstring, times the gate. Two launches.

    q_THd: f32, contiguous. k_nGd, v_nGv: f16 or f32 caches of the whole context, heads and dims
    contiguous, row stride free (v may be the front of k's rows). pos_T: int32 [T]. out_THv: f32,
    contiguous. sinks_H: f32 [H]. gate: f32 [T, *] and the columns between heads; out is multiplied
    by its sigmoid. quantized: out as int8 rows of H * dv columns. chunk: positions at once;
    None: by their size. scales: of encoded caches (kernels/kv_quant); attention is then that over
    their decoded numbers.
    """
    (n_tokens, n_heads, dim), n_groups, v_dim = q_THd.shape, v_nGv.shape[1], out_THv.shape[2]
    n_splits = scratch.max_THS.shape[2]
    assert scratch.max_THS.shape[1] == n_heads and scratch.out_THSv.shape[3] == v_dim, "scratch"
    assert window_tokens is None or selection is None, "a sliding window has no selection"
    assert quantized is None or v_dim % 32 == 0, f"{v_dim} is not whole blocks of 32"
    kept, block_tokens, budget = pos_T, 1, 0
    if selection is not None:
        kept, block_tokens = selection.blocks_Tm, selection.block_tokens
        budget = kept.shape[1]
    if chunk is None:
        chunk = 64 if (dim + v_dim) * max(2, k_nGd.element_size()) <= 1024 else 32
    kv = kv_args(k_nGd, v_nGv, scales, (dim, v_dim))
    k_scale, v_scale = kv.pop("k_scale"), kv.pop("v_scale")
    per_group = triton.cdiv(n_heads // n_groups, 16)
    block_v = max(16, triton.next_power_of_2(v_dim))
    partial_kernel[(n_tokens, n_splits, n_groups * per_group)](
        q_THd, k_nGd, v_nGv, k_scale, v_scale, kept, pos_T, scratch.max_THS, scratch.sum_THS,
        scratch.out_THSv, scale, k_nGd.stride(0), v_nGv.stride(0), H=n_heads, G=n_groups, D=dim,
        DV=v_dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_V=block_v, BLOCK_N=chunk,
        SPLITS=n_splits, WINDOW=window_tokens or 0, R=block_tokens, BUDGET=budget, **kv,
        num_warps=4, num_stages=2, **EXACT,
    )  # fmt: skip
    block_s = triton.next_power_of_2(n_splits)
    join_kernel[(n_tokens, n_heads)](
        scratch.max_THS, scratch.sum_THS, scratch.out_THSv, pos_T if sinks_H is None else sinks_H,
        *((pos_T,) if gate is None else gate[:1]), out_THv, *quantized_args(quantized, out_THv),
        0 if gate is None else gate[0].stride(0), H=n_heads, DV=v_dim, BLOCK_V=block_v,
        SPLITS=n_splits, BLOCK_S=block_s, SINKS=sinks_H is not None, GATE=gate is not None,
        GATE_HEAD=0 if gate is None else gate[1], SLOTS=quantized_slots(quantized),
        QUANTIZE=quantized is not None, num_warps=8 if block_s * block_v > 4096 else 4, **EXACT,
    )  # fmt: skip
