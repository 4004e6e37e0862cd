# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products of many tokens on tensor cores (``--numerics fast``): f16 operands, f32 sums.

Activations are f16 under a power of two for each row (``half_rows``), so no number overflows and
the largest keep 11 bits; weights are decoded to f16 a rectangle at a time, in registers. Tiles are
never written out. The order of sums is free. Codes and scales of quantized types keep at least the
11 bits of f16; of float rows numbers from 6e-5 to 65504 do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.gpu_matrix import matrix_of
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.tile_values import float_values, tile_values

_CHUNK = 4096
"""Columns of a row that ``half_rows`` holds at once."""


@dataclass(frozen=True)
class HalfRows:
    """Rows x = data * factor: data f16 [n, K], contiguous; factor f32 [n], powers of two."""

    data: torch.Tensor
    factor: torch.Tensor

    def first(self, n_rows: int) -> HalfRows:
        """The first rows, sharing memory."""
        return HalfRows(self.data[:n_rows], self.factor[:n_rows])


def new_half_rows(n_rows: int, n_cols: int, device: torch.device | str) -> HalfRows:
    """Room for n_rows rows."""
    data = torch.empty((n_rows, n_cols), dtype=torch.float16, device=device)
    return HalfRows(data, torch.empty(n_rows, device=device))


@dataclass(frozen=True)
class GemmTuning:
    """Tokens, matrix rows and columns of a program's turn (powers of two), warps, stages."""

    tokens: int
    rows: int
    cols: int
    warps: int
    stages: int


def tune_gemm(n_tokens: int, n_rows: int) -> GemmTuning:
    """The rule: tiles of 128 x 128, less for few tokens."""
    tokens = min(128, max(16, triton.next_power_of_2(n_tokens)))
    return GemmTuning(tokens, min(128, max(32, triton.next_power_of_2(n_rows))), 64, 8, 3)


@triton.jit
def half_rows_kernel(x, data, factor, STRIDE, K: tl.constexpr, CHUNK: tl.constexpr):
    """Program n: one row."""
    n = tl.program_id(0).to(tl.int64)
    top = tl.zeros((CHUNK,), tl.int32)
    for k0 in range(0, K, CHUNK):
        k = k0 + tl.arange(0, CHUNK)
        bits = tl.load(x + n * STRIDE + k, mask=k < K, other=0.0).to(tl.int32, bitcast=True)
        top = tl.maximum(top, bits & 0x7FFFFFFF)
    power = tl.max(top, axis=0) & 0x7F800000
    # 2^-100 .. 2^100; NaN and infinity stay what they are under any factor
    power = tl.minimum(tl.maximum(power, 0x0D800000), 0x71800000)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    for k0 in range(0, K, CHUNK):
        k = k0 + tl.arange(0, CHUNK)
        y = tl.load(x + n * STRIDE + k, mask=k < K, other=0.0) * inverse
        tl.store(data + n * K + k, y.to(tl.float16), mask=k < K)
    tl.store(factor + n, power.to(tl.float32, bitcast=True))


def half_rows(x_TK: torch.Tensor, out: HalfRows) -> None:
    """Fill the first T rows of ``out`` from f32 [T, K], row stride free. One launch."""
    n_rows, n_cols = x_TK.shape
    assert out.data.shape[1] == n_cols and len(out.data) >= n_rows, tuple(out.data.shape)
    assert x_TK.dtype == torch.float32 and x_TK.stride(1) == 1, "rows of f32"
    chunk = min(_CHUNK, triton.next_power_of_2(n_cols))
    half_rows_kernel[(n_rows,)](
        x_TK, out.data, out.factor, x_TK.stride(0), K=n_cols, CHUNK=chunk,
        num_warps=max(1, min(8, chunk // 512)),
    )  # fmt: skip


@triton.jit
def half_values(M: tl.constexpr, IS_TILES: tl.constexpr, base, row, first_col, COLS: tl.constexpr):
    """f16 [ROWS, COLS] of a matrix."""
    if IS_TILES:
        return tile_values(M, base, row, first_col // 32, COLS // 32).to(tl.float16)
    else:
        w = float_values(M, base, row, first_col, COLS)
        return w.to(tl.float32).to(tl.float16)


@triton.jit
def gemm_kernel(
    x, factor, base, out, scale, n_tokens, OUT_STRIDE,
    M: tl.constexpr, IS_TILES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, t): rows p * ROWS and up, tokens t * TOKENS and up."""
    K: tl.constexpr = M.n_cols
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok_t = (t < n_tokens)[:, None]
    at = x + t[:, None].to(tl.int64) * K
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for k0 in tl.range(0, K, COLS, num_stages=STAGES):
        k = k0 + tl.arange(0, COLS)[None, :]
        x_TK = tl.load(at + k, mask=ok_t & (k < K), other=0.0)
        w_RK = half_values(M, IS_TILES, base, row, k0, COLS)
        acc = tl.dot(x_TK, tl.trans(w_RK), acc)
    acc = acc * (tl.load(factor + t, mask=t < n_tokens, other=0.0) * scale)[:, None]
    out_at = out + t[:, None].to(tl.int64) * OUT_STRIDE + row[None, :]
    tl.store(out_at, acc, mask=ok_t & (row < M.n_rows)[None, :])


def linear_many(
    weight: GpuWeight, out_TN: torch.Tensor, x: HalfRows, tuning: GemmTuning | None = None
) -> None:
    """out[t] = weight x[t] of the first T rows of x; any T. One launch.

    out_TN: f32 [T, N], rows contiguous.
    """
    n_tokens, n_rows = out_TN.shape
    assert n_rows == weight.n_rows and out_TN.stride(1) == 1, tuple(out_TN.shape)
    assert x.data.shape[1] == weight.n_cols and len(x.data) >= n_tokens, tuple(x.data.shape)
    tuning = tuning or tune_gemm(n_tokens, n_rows)
    grid = (triton.cdiv(n_rows, tuning.rows), triton.cdiv(n_tokens, tuning.tokens))
    gemm_kernel[grid](
        x.data, x.factor, weight.data.data_ptr(), out_TN, weight.scale, n_tokens,
        out_TN.stride(0), M=matrix_of(weight), IS_TILES=weight.is_tiles, TOKENS=tuning.tokens,
        ROWS=tuning.rows, COLS=tuning.cols, STAGES=tuning.stages, num_warps=tuning.warps,
    )  # fmt: skip


@triton.jit
def decode_kernel(
    base, out, M: tl.constexpr, IS_TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Program (p, c): a rectangle."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLS
    w = half_values(M, IS_TILES, base, row, first, COLS)
    k = first + tl.arange(0, COLS)[None, :]
    ok = (row < M.n_rows)[:, None] & (k < M.n_cols)
    tl.store(out + row[:, None].to(tl.int64) * M.n_cols + k, w, mask=ok)


def decode(weight: GpuWeight, out_NK: torch.Tensor) -> None:
    """The whole matrix as f16 [N, K] (without its scale), for a library's product. One launch."""
    shape = (weight.n_rows, weight.n_cols)
    assert tuple(out_NK.shape) == shape and out_NK.is_contiguous(), tuple(out_NK.shape)
    assert out_NK.dtype == torch.float16, "f16"
    rows, cols = 32, 128
    decode_kernel[(triton.cdiv(shape[0], rows), triton.cdiv(shape[1], cols))](
        weight.data.data_ptr(), out_NK, M=matrix_of(weight), IS_TILES=weight.is_tiles, ROWS=rows,
        COLS=cols, num_warps=4,
    )  # fmt: skip
