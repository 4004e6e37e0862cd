# mypy: allow-untyped-defs, allow-untyped-decorators
"""Between the projections and the attention of a layer, in one launch: bias, q and k norm, rotary,
keys and values into the cache; with an indexer also its queries, raw key and block key.

Knows no windows but their first position. Program (t, e): query head e; then key/value heads; then
the indexer's query heads and its key. A program never reads what another one writes: what the
window adds to the ring of raw keys is not among what it reads (models/ring).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.kv_quant.triton import KvScales, kv_args, store_vector
from strata.kernels.rms_norm.triton import inverse_rms
from strata.kernels.rotary.triton import RotaryTable, partner_of, rotated
from strata.kernels.triton_common import EXACT


@dataclass(frozen=True)
class HeadInput:
    """Heads as a projection leaves them, and what is done to each.

    x_TN: f32 [T, *], row stride free; head h begins at column h * stride. stride: width of a head,
    or twice that where gates stand between. bias_N: f32, indexed like a row of x, or None.
    norm_d: f32 [d], full weight, or None.
    """

    x_TN: torch.Tensor
    stride: int
    bias_N: torch.Tensor | None = None
    norm_d: torch.Tensor | None = None


@dataclass(frozen=True)
class IndexerInput:
    """The indexer's half of a launch; see kernels/qsa.

    q, k: projections (k one head, its norm is that of block keys). q_out_TId: f32 [T, I, d].
    ring_Ed: f32 [entries, d], raw keys by position. block_keys_Bd: f16 or f32 [blocks, d].
    """

    q: HeadInput
    k: HeadInput
    q_out_TId: torch.Tensor
    ring_Ed: torch.Tensor
    block_keys_Bd: torch.Tensor
    block_tokens: int


@triton.jit
def _head(
    x, bias, norm, i, j, ok, pos, eps, turns, factor, D: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Dims i (partners j) of one head: bias, norm, rotary."""
    y = tl.load(x + i, mask=ok, other=0.0)
    other = tl.load(x + j, mask=ok, other=0.0)
    if BIAS:
        y += tl.load(bias + i, mask=ok, other=0.0)
        other += tl.load(bias + j, mask=ok, other=0.0)
    return _normed_rotated(y, other, norm, i, j, ok, pos, eps, turns, factor, D, N, PAIRS, NORM)


@triton.jit
def _normed_rotated(
    y, other, norm, i, j, ok, pos, eps, turns, factor, D: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    if NORM:
        scale = inverse_rms(y, D, eps)
        y = y * scale * tl.load(norm + i, mask=ok, other=0.0)
        other = other * scale * tl.load(norm + j, mask=ok, other=0.0)
    return rotated(y, other, i, pos, turns, factor, N, PAIRS)


@triton.jit
def _block_mean(
    ik, ring, first, start, i, ok, STRIDE, ID: tl.constexpr, E: tl.constexpr, R: tl.constexpr
):
    """Mean of dims i of the raw keys at first .. first + R - 1, in the ring before start."""
    total = tl.zeros(i.shape, tl.float32)
    for s in tl.static_range(R):
        c = first + s
        total += tl.load(ring + (c % E) * ID + i, mask=ok & (c < start), other=0.0)
        total += tl.load(ik + (c - start) * STRIDE + i, mask=ok & (c >= start), other=0.0)
    return total / R


@triton.jit
def _attention_head(
    e, t, p, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, q_out, k_cache, v_cache, k_scale,
    v_scale, eps, turns, factor, Q_STRIDE, K_STRIDE, V_STRIDE, HEAD: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, BITS: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
):  # fmt: skip
    """Query head e < H, or key and value head e - H."""
    i = tl.arange(0, BLOCK)
    j = partner_of(i, N, PAIRS)
    ok = i < D
    if e < H:
        at = q + t * Q_STRIDE + e * HEAD
        y = _head(at, q_bias + e * HEAD, q_norm, i, j, ok, p, eps, turns, factor, D, N, PAIRS,
                  BIAS, NORM)  # fmt: skip
        tl.store(q_out + (t * H + e) * D + i, y, mask=ok)
    else:
        g = e - H
        vector = p.to(tl.int64) * G + g
        at = k + t * K_STRIDE + g * D
        y = _head(at, k_bias + g * D, k_norm, i, j, ok, p, eps, turns, factor, D, N, PAIRS, BIAS,
                  NORM)  # fmt: skip
        store_vector(y, k_cache, k_scale, vector, D, BLOCK, BITS, K_GROUP)
        value = tl.load(v + t * V_STRIDE + g * D + i, mask=ok, other=0.0)
        if BIAS:
            value += tl.load(v_bias + g * D + i, mask=ok, other=0.0)
        store_vector(value, v_cache, v_scale, vector, D, BLOCK, BITS, V_GROUP)


@triton.jit
def _index_head(
    e, t, p, q, k, q_norm, k_norm, q_out, ring, keys, eps, turns, factor, Q_STRIDE, K_STRIDE,
    IH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
    E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Index query e < IH, or the raw key and the key of the block that it completes."""
    i = tl.arange(0, BLOCK)
    j = partner_of(i, N, PAIRS)
    ok = i < D
    if e < IH:
        at = q + t * Q_STRIDE + e * D
        y = _head(at, at, q_norm, i, j, ok, p, eps, turns, factor, D, N, PAIRS, False, True)
        tl.store(q_out + (t * IH + e) * D + i, y, mask=ok)
    else:
        raw = tl.load(k + t * K_STRIDE + i, mask=ok, other=0.0)
        tl.store(ring + (p % E) * D + i, raw, mask=ok)
        if (p + 1) % R == 0:
            first = p - (R - 1)
            mean = _block_mean(k, ring, first, p - t, i, ok, K_STRIDE, D, E, R)
            other = _block_mean(k, ring, first, p - t, j, ok, K_STRIDE, D, E, R)
            key = _normed_rotated(mean, other, k_norm, i, j, ok, first, eps, turns, factor, D, N,
                                  PAIRS, True)  # fmt: skip
            at_key = keys + (p // R).to(tl.int64) * D + i
            tl.store(at_key, key.to(keys.dtype.element_ty), mask=ok)


@triton.jit
def append_kernel(
    q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, q_out, k_cache, v_cache, k_scale, v_scale,
    pos, eps, turns, factor, Q_STRIDE, K_STRIDE, V_STRIDE, HEAD: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, BITS: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    iq, ik, iq_norm, ik_norm, iq_out, ring, keys, IQ_STRIDE, IK_STRIDE, IH: tl.constexpr,
    ID: tl.constexpr, IBLOCK: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """HEAD: columns between query heads. IH: index heads, 0 without an indexer. E: ring entries."""
    t = tl.program_id(0)
    e = tl.program_id(1)
    p = tl.load(pos + t)
    if e < H + G:
        _attention_head(
            e, t, p, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, q_out, k_cache, v_cache,
            k_scale, v_scale, eps, turns, factor, Q_STRIDE, K_STRIDE, V_STRIDE, HEAD, H, G, D,
            BLOCK, N, PAIRS, BIAS, NORM, BITS, K_GROUP, V_GROUP,
        )  # fmt: skip
    elif IH > 0:
        _index_head(
            e - H - G, t, p, iq, ik, iq_norm, ik_norm, iq_out, ring, keys, eps, turns, factor,
            IQ_STRIDE, IK_STRIDE, IH, ID, IBLOCK, N, PAIRS, E, R,
        )  # fmt: skip


def append(
    q: HeadInput,
    k: HeadInput,
    v: HeadInput,
    q_out_THd: torch.Tensor,
    k_cache_nGd: torch.Tensor,
    v_cache_nGd: torch.Tensor,
    pos_T: torch.Tensor,
    eps: float,
    table: RotaryTable,
    indexer: IndexerInput | None = None,
    scales: KvScales | None = None,
) -> None:
    """Queries into q_out, keys and values into the caches at the tokens' positions. One launch.

    q_out: f32 [T, H, d]. Caches: f16 or f32 [context, G, d], or encoded (kernels/kv_quant) with
    their scales, contiguous. pos_T: int32 [T],
    consecutive. Biases and norms: all of q, k (, v) have them, or none.
    """
    (n_tokens, n_heads, dim), n_groups = q_out_THd.shape, k_cache_nGd.shape[1]
    assert (q.bias_N is None) == (k.bias_N is None) == (v.bias_N is None), "biases: all or none"
    assert (q.norm_d is None) == (k.norm_d is None), "norms: both or none"
    other = pos_T
    biases = [other if h.bias_N is None else h.bias_N for h in (q, k, v)]
    norms = [other if h.norm_d is None else h.norm_d for h in (q, k)]
    extra = _indexer_args(indexer, other)
    n_index = extra["IH"]
    kv = kv_args(k_cache_nGd, v_cache_nGd, scales, (dim, dim))
    k_scale, v_scale = kv.pop("k_scale"), kv.pop("v_scale")
    block = triton.next_power_of_2(dim)
    append_kernel[(n_tokens, n_heads + n_groups + (n_index + 1 if n_index else 0))](
        q.x_TN, k.x_TN, v.x_TN, *biases, *norms, q_out_THd, k_cache_nGd, v_cache_nGd, k_scale,
        v_scale, pos_T, eps, table.turns_n, table.factor, q.x_TN.stride(0), k.x_TN.stride(0),
        v.x_TN.stride(0), HEAD=q.stride, H=n_heads, G=n_groups, D=dim, BLOCK=block, N=table.n,
        PAIRS=table.pairs,
        BIAS=q.bias_N is not None, NORM=q.norm_d is not None, **extra,
        **kv,
        num_warps=max(1, min(4, block // 64)), **EXACT,
    )  # fmt: skip


def _indexer_args(indexer: IndexerInput | None, other: torch.Tensor) -> dict[str, object]:
    if indexer is None:
        names = ("iq", "ik", "iq_norm", "ik_norm", "iq_out", "ring", "keys")
        sizes = {"IQ_STRIDE": 0, "IK_STRIDE": 0, "IH": 0, "ID": 1, "IBLOCK": 1, "E": 1, "R": 1}
        return dict.fromkeys(names, other) | sizes
    q, k = indexer.q, indexer.k
    assert q.norm_d is not None and k.norm_d is not None, "the indexer has norms"
    _, n_heads, dim = indexer.q_out_TId.shape
    return {
        "iq": q.x_TN,
        "ik": k.x_TN,
        "iq_norm": q.norm_d,
        "ik_norm": k.norm_d,
        "iq_out": indexer.q_out_TId,
        "ring": indexer.ring_Ed,
        "keys": indexer.block_keys_Bd,
        "IQ_STRIDE": q.x_TN.stride(0),
        "IK_STRIDE": k.x_TN.stride(0),
        "IH": n_heads,
        "ID": dim,
        "IBLOCK": triton.next_power_of_2(dim),
        "E": len(indexer.ring_Ed),
        "R": indexer.block_tokens,
    }
