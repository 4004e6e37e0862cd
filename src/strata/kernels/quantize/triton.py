# mypy: allow-untyped-defs, allow-untyped-decorators
"""Int8 activations on the GPU: a kernel, and the device function for kernels that make x."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.quantize.ref import Quantized
from strata.kernels.triton_common import EXACT, SEGMENTS, rint

_BLOCKS = 8
"""Blocks of 32 a program."""


@triton.jit
def quantize_blocks(x, N: tl.constexpr):
    """Contract 1 for blocks f32 [N, 32]: q int32 [N, 32], scale f32 [N], half sums int32 [N]."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    usable = (bits < 0x7F800000) & (bits >= 0x0D800000)  # below infinity, from 2^-100 on
    amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.where(usable, tl.div_rn(amax, tl.full((N,), 127.0, tl.float32)), 0.0)
    scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
    inverse = tl.div_rn(tl.full((N,), 127.0, tl.float32), amax)
    q = rint(tl.where(usable[:, None], x, 0.0) * inverse[:, None]).to(tl.int32)
    low, high = tl.split(tl.sum(tl.reshape(q, (N, 2, 16)), axis=2))
    return q, scale, low, high


@triton.jit
def store_blocks(x, block, ok, q_row, meta_row, NB: tl.constexpr, N: tl.constexpr, first=0):
    """Quantize f32 [N, 32], blocks ``block`` [N] of a row, and write those that are ``ok`` [N].

    q_row: int8 pointer, meta_row: int32 pointer to the row's first slot. NB: blocks of a row.
    first: slots before the row's first one, a number or [N].
    """
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    q, scale, low, high = quantize_blocks(x, N)
    slot = first + (block % L) * SEGMENTS + block // L
    k = tl.arange(0, 32)[None, :]
    tl.store(q_row + slot[:, None] * 32 + k, q.to(tl.int8), mask=ok[:, None])
    tl.store(meta_row + slot * 2, scale.to(tl.int32, bitcast=True), mask=ok)
    tl.store(meta_row + slot * 2 + 1, (low & 0xFFFF) | (high << 16), mask=ok)


@triton.jit
def quantize_kernel(x, q, meta, NB: tl.constexpr, SLOTS: tl.constexpr, N: tl.constexpr):
    """Program (t, p) quantizes N blocks of token t."""
    t = tl.program_id(0)
    block = tl.program_id(1) * N + tl.arange(0, N)
    ok = block < NB
    k = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + t * NB * 32 + k, mask=ok[:, None], other=0.0)
    store_blocks(values, block, ok, q + t * SLOTS * 32, meta + t * SLOTS * 2, NB, N)


def quantize(x_TK: torch.Tensor, out: Quantized) -> None:
    """Fill the first T rows of ``out`` from x f32 [T, K], contiguous. One launch."""
    n_tokens, n_cols = x_TK.shape
    assert n_cols == out.n_cols and n_tokens <= out.n_rows, (tuple(x_TK.shape), out.q.shape)
    assert x_TK.is_contiguous() and x_TK.dtype == torch.float32, "x is f32 and contiguous"
    n_blocks, slots = n_cols // 32, out.q.shape[1]
    grid = (n_tokens, triton.cdiv(n_blocks, _BLOCKS))
    quantize_kernel[grid](
        x_TK, out.q, out.meta, NB=n_blocks, SLOTS=slots, N=_BLOCKS, num_warps=2, **EXACT
    )
