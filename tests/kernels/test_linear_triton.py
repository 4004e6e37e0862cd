"""GPU products: tiles against the contract bit for bit, float rows against their stated order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.formats.tiles import tile_format
from strata.formats.weight_types import TYPES
from strata.kernels.gpu_matrix import float_matrix, matrix_of, tile_matrix
from strata.kernels.gpu_weight import to_gpu
from strata.kernels.linear import linear, linear_contract
from strata.kernels.linear.launch import Tuning, tune
from strata.kernels.linear.triton import linear as linear_triton
from strata.kernels.numerics import fma32
from strata.kernels.quantize import new_quantized, quantize
from strata.kernels.weight import Weight
from tests.kernels.test_linear import make_weight, n_cols_of, same_bits
from tests.kernels.test_quantize import hard_rows

TILED = sorted(name for name in TYPES if tile_format(name) is not None)


def run(weights, x, device, tuning=None):
    """Products of all weights in one launch; outputs start as NaN."""
    n_tokens, n_cols = x.shape
    x_q = new_quantized(n_tokens, n_cols, "cpu") if n_cols % 32 == 0 else None
    if x_q is not None:
        quantize(x, x_q)
        x_q = type(x_q)(n_cols, x_q.q.to(device), x_q.meta.to(device))
    outs = [torch.full((n_tokens, w.n_rows), float("nan"), device=device) for w in weights]
    linear_triton([to_gpu(w, device) for w in weights], outs, x.to(device), x_q, tuning)
    return [out.cpu() for out in outs]


def rows(rng, n_tokens, n_cols):
    return torch.from_numpy(rng.standard_normal((n_tokens, n_cols)).astype(np.float32))


@pytest.mark.parametrize("name", TILED)
def test_tiles_equal_contract(name, triton_device):
    """Expectation: linear_contract, bit for bit; the last rows fill no tile, segments are short."""
    rng = np.random.default_rng(len(name))
    n_cols = n_cols_of(name, 9)
    w = make_weight(name, 20, n_cols, rng, scale=0.37 if name == "NVFP4" else 1.0)
    x = rows(rng, 1, n_cols)
    (got,) = run([w], x, triton_device, Tuning(1, 32, 1, 3))
    same_bits(got, linear_contract(x, w))


@pytest.mark.parametrize(
    ("name", "n_rows", "n_blocks", "tuning"),
    [
        ("Q4_1", 36, 8, Tuning(1, 16, 1, 2)),  # full segments, rows to spare
        ("IQ4_NL", 16, 20, None),  # K = 640: three blocks a segment, the last one has none
        ("MXFP4", 40, 10, Tuning(2, 32, 1, 4)),  # K = 320; the last program has rows to spare
        ("Q4_1", 8, 8, Tuning(1, 4, 1, 2)),  # fewer rows than a tile: scales read as words
        ("Q4_K", 8, 8, Tuning(1, 8, 1, 2)),
        ("Q6_K", 16, 16, Tuning(2, 16, 1, 1)),
        ("NVFP4", 4, 10, Tuning(1, 4, 1, 2)),
        ("MXFP4", 4, 10, Tuning(1, 4, 1, 2)),
        # blocks spread over threads: sums at the end; step by step; segments that end early
        ("Q6_K", 20, 24, Tuning(1, 8, 1, 0, 2)),
        ("Q4_K", 8, 16, Tuning(2, 8, 1, 0, 4)),
        ("Q6_K", 16, 80, Tuning(4, 16, 1, 0, 4)),
        ("Q2_K", 12, 40, Tuning(2, 8, 1, 0, 4)),
        ("Q8_0", 20, 9, Tuning(1, 4, 1, 0, 4)),
        ("IQ4_NL", 16, 28, Tuning(1, 8, 1, 0, 2)),
    ],
)
def test_shapes_and_tunings(name, n_rows, n_blocks, tuning, triton_device):
    """Expectation: linear_contract, whatever the division into programs."""
    rng = np.random.default_rng(n_rows)
    w, x = make_weight(name, n_rows, 32 * n_blocks, rng), rows(rng, 2, 32 * n_blocks)
    same_bits(run([w], x, triton_device, tuning)[0], linear_contract(x, w))


def test_rule_for_spread_blocks():
    """Few long rows in 8-bit tiles alone, up to 4 tokens (launch's text)."""
    long, short = tile_matrix("Q6_K", 2560, 6144), tile_matrix("Q6_K", 2560, 2560)
    many, four = tile_matrix("Q6_K", 8192, 6144), tile_matrix("Q4_K", 2560, 6144)
    floats = float_matrix("BF16", 48, 6144)
    spread = [([long], 1), ([long], 4)]
    lanes = [([long], 5), ([short], 1), ([many], 1), ([long, floats], 1), ([four], 1)]
    assert {tune(matrices, n).blocks for matrices, n in spread} == {4}
    assert {tune(matrices, n).blocks for matrices, n in lanes} == {1}


def test_bad_activations(triton_device):
    """Expectation: linear_contract, when blocks hold NaN, infinity, zeros or tiny numbers."""
    rng = np.random.default_rng(3)
    w, x = make_weight("Q4_K", 16, 256, rng), torch.from_numpy(hard_rows(3, 256, rng))
    for t in range(3):
        same_bits(run([w], x[t : t + 1], triton_device)[0], linear_contract(x[t : t + 1], w))


def test_tokens_do_not_meet(triton_device):
    """Each of 8 tokens has the bits that it has alone, in tiles and in float rows."""
    rng = np.random.default_rng(8)
    x = rows(rng, 8, 64)
    weights = [make_weight(name, 16, 64, rng) for name in ("IQ4_NL", "BF16", "F32")]
    together = run(weights, x, triton_device)
    for t in (0, 3, 7):
        for got, alone in zip(together, run(weights, x[t : t + 1], triton_device), strict=True):
            same_bits(got[t : t + 1], alone)


def test_many_matrices_in_one_launch(triton_device):
    """Equal shapes side by side, other types and floats between: each equals its own product."""
    rng = np.random.default_rng(5)
    names = ["Q8_0", "Q8_0", "Q8_0", "F16", "Q2_0", "BF16", "BF16", "Q8_0"]
    n_rows = [16, 16, 16, 3, 20, 5, 5, 8]
    x = rows(rng, 2, 64)
    weights = [make_weight(n, r, 64, rng, 1.0) for n, r in zip(names, n_rows, strict=True)]
    for w, got in zip(weights, run(weights, x, triton_device), strict=True):
        if TYPES[w.type].kind == "quantized":
            same_bits(got, linear_contract(x, w))
        else:
            (alone,) = run([w], x, triton_device, Tuning(1, 4, 2, 2))
            same_bits(got, alone)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E4M3_B128"])
@pytest.mark.parametrize("n_cols", [31, 40, 320, 640])
def test_float_rows(name, n_cols, triton_device):
    """Expectation: the stated order of ``float_product`` in NumPy; near the plain f64 product."""
    if name == "F8_E4M3_B128":
        n_cols = 384
    rng = np.random.default_rng(n_cols)
    w, x = make_weight(name, 5, n_cols, rng, scale=0.5), rows(rng, 2, n_cols)
    (got,) = run([w], x, triton_device)
    matrix = matrix_of(to_gpu(w, "cpu"))
    same_bits(got, in_stated_order(x.numpy(), w.dequantize(slice(0, 5)), matrix.lanes) * 0.5)
    exact = linear(x, w, torch.float64)
    size = linear(x.abs(), abs_weight(w), torch.float64)
    steps = -(-n_cols // matrix.lanes) + np.log2(matrix.lanes) + 2
    assert ((got - exact).abs() <= size * steps * 2.0**-24).all()


def in_stated_order(x, w, lanes):
    """The order of float_product's docstring, one fma at a time."""
    padding = -x.shape[1] % lanes
    x = np.pad(x, ((0, 0), (0, padding))).reshape(len(x), 1, -1, lanes)
    w = np.pad(w, ((0, 0), (0, padding))).reshape(1, len(w), -1, lanes)
    p = np.zeros((x.shape[0], w.shape[1], lanes), np.float32)
    for c in range(x.shape[2]):
        p = fma32(w[:, :, c], x[:, :, c], p)
    while p.shape[2] > 1:
        p = p[:, :, 0::2] + p[:, :, 1::2]
    return p[:, :, 0]


def abs_weight(w):
    """The matrix of magnitudes as F32."""
    raw = np.abs(w.dequantize(slice(0, w.n_rows))).astype(np.float32)
    return Weight("F32", w.n_rows, w.n_cols, torch.from_numpy(raw.view(np.uint8)), w.scale)


def test_outputs_may_be_parts_of_rows(triton_device):
    """Outputs that are columns of one wide buffer; the columns between stay as they were."""
    rng = np.random.default_rng(9)
    a, b, x = make_weight("Q4_0", 16, 32, rng), make_weight("F32", 4, 32, rng), rows(rng, 2, 32)
    x_q = new_quantized(2, 32, "cpu")
    quantize(x, x_q)
    wide = torch.full((2, 40), 7.0, device=triton_device)
    outs = [wide[:, 2:18], wide[:, 30:34]]
    x_q = type(x_q)(32, x_q.q.to(triton_device), x_q.meta.to(triton_device))
    gpu = [to_gpu(w, triton_device) for w in (a, b)]
    linear_triton(gpu, outs, x.to(triton_device), x_q)
    same_bits(outs[0].cpu(), linear_contract(x, a))
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[2:18] = untouched[30:34] = False
    assert (wide.cpu()[:, untouched] == 7).all()
