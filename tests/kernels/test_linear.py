"""Row products: bit-exact against the scalar contract, near the plain product, independent of T."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.formats.quants import decode, dequantize
from strata.formats.tiles import encode
from strata.formats.weight_types import TYPES
from strata.kernels.linear import linear, linear_contract
from strata.kernels.numerics import quantize_activations
from strata.kernels.weight import Weight
from tests import ggml_ref
from tests.kernels import scalar_contract as scalar

U = 2.0**-24
QUANTIZED = [t.name for t in TYPES.values() if t.kind == "quantized"]
FLOAT = ["F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3_B128"]


def make_weight(name, n_rows, n_cols, rng, scale=1.0):
    """A matrix with finite values in every storage type, from random bytes."""
    t = TYPES[name]
    if t.kind == "quantized":
        raw = ggml_ref.random_raw(t, n_rows, n_cols, rng)
        blocks = raw.reshape(-1, t.block_bytes)
        if name == "MXFP4":  # about 2^-8, so that an expert's activation is not saturated
            blocks[:, 0] = rng.integers(116, 124, len(blocks))
        if name == "NVFP4":
            blocks[:, :4] = rng.integers(0x08, 0x20, (len(blocks), 4))
    elif name.startswith("F8"):
        raw = rng.integers(0, 0x7C, (n_rows, t.row_bytes(n_cols)), np.uint8)
        if name == "F8_E4M3_B128":
            blocks = raw.reshape(n_rows, -1, 132)
            factors = rng.random((n_rows, blocks.shape[1], 1)).astype(np.float32)
            blocks[:, :, 128:] = factors.view(np.uint8)
    else:
        x = rng.normal(0, 0.05, (n_rows, n_cols))
        if name == "BF16":
            raw = torch.from_numpy(x).bfloat16().view(torch.uint8).numpy()
        else:
            raw = x.astype({"F32": "f4", "F16": "f2", "F64": "f8"}[name]).view(np.uint8)
    return Weight(name, n_rows, n_cols, torch.from_numpy(raw), scale)


def n_cols_of(name, n_blocks):
    """A width of about n_blocks blocks of 32, whole blocks of the type."""
    block = TYPES[name].block_weights
    return -(-32 * n_blocks // block) * block


def same_bits(got, expected):
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def scalar_products(x, w):
    """Contract 3 and 4 by the scalar transcription."""
    t, raw = TYPES[w.type], w.data.numpy()
    out = np.empty((len(x), w.n_rows), np.float32)
    for n in range(w.n_rows):
        for i, row in enumerate(x):
            if t.kind == "quantized":
                c = decode(t, raw[n : n + 1])
                minimum = None if c.minimum is None else c.minimum[0]
                y = scalar.quantized_row(c.codes[0], c.scale[0], minimum, t.group, row)
            else:
                y = scalar.float_row(dequantize(t, raw[n : n + 1])[0], row)
            out[i, n] = y * np.float32(w.scale) if w.scale != 1.0 else y
    return out


@pytest.mark.parametrize("name", QUANTIZED + FLOAT)
def test_equals_scalar_contract(name):
    """Expectation: the scalar transcription with C's fmaf; NB of 1, 9 and 13 or whole blocks."""
    rng = np.random.default_rng(len(name))
    for n_blocks, n_rows in ((1, 2), (9, 3), (13, 1)):
        n_cols = n_cols_of(name, n_blocks)
        w = make_weight(name, n_rows, n_cols, rng, scale=0.37 if name == "NVFP4" else 1.0)
        x = rng.standard_normal((2, n_cols)).astype(np.float32)
        same_bits(linear_contract(torch.from_numpy(x), w), scalar_products(x, w))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([n for n in QUANTIZED if TYPES[n].block_weights == 32]),
    n_blocks=st.integers(1, 20),
    n_rows=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_equal_scalar_contract(name, n_blocks, n_rows, seed):
    """Expectation: the scalar transcription, for k = 32 n with short and empty segments."""
    rng = np.random.default_rng(seed)
    w = make_weight(name, n_rows, 32 * n_blocks, rng)
    x = np.ldexp(rng.standard_normal((1, 32 * n_blocks)), rng.integers(-30, 30)).astype(np.float32)
    same_bits(linear_contract(torch.from_numpy(x), w), scalar_products(x, w))


@pytest.mark.parametrize("n_cols", [1, 31, 33, 100])
def test_float_widths_are_padded(n_cols):
    """Contract 4: a width that is not a multiple of 32 counts as padded with zeros."""
    rng = np.random.default_rng(n_cols)
    w = make_weight("F32", 2, n_cols, rng)
    x = rng.standard_normal((3, n_cols)).astype(np.float32)
    same_bits(linear_contract(torch.from_numpy(x), w), scalar_products(x, w))


@pytest.mark.parametrize("name", QUANTIZED + FLOAT)
def test_plain_product(name):
    """Expectation: dequantize, then an f64 einsum written here, then the tensor scale."""
    rng = np.random.default_rng(7)
    w = make_weight(name, 5, n_cols_of(name, 8), rng, scale=2.5)
    x = rng.standard_normal((3, w.n_cols))
    matrix = np.float64(dequantize(TYPES[name], w.data.numpy()))
    expected = np.einsum("tk,nk->tn", x, matrix) * 2.5
    magnitude = np.einsum("tk,nk->tn", np.abs(x), np.abs(matrix)) * 2.5
    for dtype, eps in ((torch.float64, 2.0**-53), (torch.float32, U)):
        y = linear(torch.from_numpy(x), w, dtype)
        assert y.dtype == dtype
        bound = (w.n_cols + 8) * eps * magnitude
        assert (np.abs(y.double().numpy() - expected) <= bound).all()


def stated_bound(x, w):
    """Section "Stated rounding" of the contract, in f64: (y*, bound), both [T, N]."""
    t, raw = TYPES[w.type], w.data.numpy()
    x64 = np.float64(x)
    if t.kind != "quantized":
        matrix = np.float64(dequantize(t, raw))
        n = -(-w.n_cols // 32) + 6
        bound = n * U / (1 - n * U) * (np.abs(x64) @ np.abs(matrix).T) + w.n_cols * 2.0**-149
        return x64 @ matrix.T * w.scale, bound * abs(w.scale)
    c = decode(t, raw)
    g, n_tokens, n_blocks = t.group, len(x), w.n_cols // 32
    scale = np.float64(c.scale)
    minimum = np.zeros_like(scale) if c.minimum is None else np.float64(c.minimum)
    matrix = c.codes * np.repeat(scale, g, axis=1) - np.repeat(minimum, g, axis=1)
    q, s_x = quantize_activations(x)
    s_x = np.float64(s_x)
    error = np.where(s_x > 0, s_x * (0.5 + 2.0**-15), 2.0**-100)
    block_sum = np.abs(matrix).reshape(w.n_rows, n_blocks, 32).sum(2)
    groups_q = np.float64(q).reshape(n_tokens, -1, g)
    dot = np.einsum("tgi,ngi->tng", groups_q, np.float64(c.codes).reshape(w.n_rows, -1, g))
    scale_x = np.repeat(s_x, 32 // g, axis=1)[:, None]
    terms = np.abs(dot) * scale_x * np.abs(scale)
    terms = terms + np.abs(groups_q.sum(2))[:, None] * scale_x * np.abs(minimum)
    n = -(-n_blocks // 8) * (32 // g) * (2 if t.has_min else 1) + 5
    bound = error @ block_sum.T + n * U / (1 - n * U) * terms.sum(2) + n_blocks * 2.0**-126
    return x64 @ matrix.T * w.scale, bound * abs(w.scale)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(QUANTIZED + FLOAT),
    n_blocks=st.integers(1, 40),
    n_rows=st.integers(1, 5),
    exponent=st.integers(-60, 40),
    spread=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_within_the_stated_rounding(name, n_blocks, n_rows, exponent, spread, seed):
    """Expectation: the bound stated in the decision file, evaluated in f64."""
    rng = np.random.default_rng(seed)
    w = make_weight(name, n_rows, n_cols_of(name, n_blocks), rng)
    x = rng.standard_normal((2, w.n_cols)) * np.exp2(rng.uniform(-spread, 0, (1, w.n_cols)))
    x = np.ldexp(x, exponent).astype(np.float32)
    expected, bound = stated_bound(x, w)
    y = linear_contract(torch.from_numpy(x), w).double().numpy()
    assert (np.abs(y - expected) <= bound).all()


def test_the_stated_rounding_is_not_loose():
    """A bound worth stating: a flipped code or a dropped last block of 32 breaks it."""
    rng = np.random.default_rng(3)
    w = make_weight("Q4_0", 16, 1024, rng)
    x = rng.standard_normal((1, 1024)).astype(np.float32) * 10
    expected, bound = stated_bound(x, w)
    shorter = Weight("Q4_0", 16, 992, w.data[:, :-18].contiguous())
    y = linear_contract(torch.from_numpy(x[:, :992].copy()), shorter).double().numpy()
    assert (np.abs(y - expected) > bound).any()


@pytest.mark.parametrize("name", QUANTIZED + FLOAT)
def test_row_t_does_not_depend_on_the_others(name):
    """Contract 7: row t of a T-row product equals the one-row product bit for bit."""
    rng = np.random.default_rng(11)
    w = make_weight(name, 7, n_cols_of(name, 11), rng)
    x = torch.from_numpy(rng.standard_normal((5, w.n_cols)).astype(np.float32))
    x[2, 3] = float("nan")
    together = linear_contract(x, w)
    for t in range(5):
        same_bits(together[t : t + 1], linear_contract(x[t : t + 1], w))


@pytest.mark.parametrize("name", QUANTIZED + FLOAT)
def test_extreme_activations(name):
    """C18a: 1e6 stays finite; a NaN or infinity in a row reaches every output of that row only."""
    rng = np.random.default_rng(13)
    w = make_weight(name, 3, n_cols_of(name, 8), rng)
    x = rng.standard_normal((4, w.n_cols)).astype(np.float32)
    x[0, 17], x[1, 5], x[2, 40] = 1e6, np.nan, np.inf
    y = linear_contract(torch.from_numpy(x), w).numpy()
    assert np.isfinite(y[0]).all() and np.isfinite(y[3]).all()
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()


def test_pieces_do_not_show():
    """A matrix large enough to be cut into several pieces equals its rows computed apart."""
    rng = np.random.default_rng(17)
    w = make_weight("Q6_K", 1100, 1024, rng)
    x = torch.from_numpy(rng.standard_normal((2, 1024)).astype(np.float32))
    whole = linear_contract(x, w)
    for start in (0, 1020, 1099):
        part = Weight("Q6_K", 1, 1024, w.data[start : start + 1])
        same_bits(whole[:, start : start + 1], linear_contract(x, part))
    assert linear_contract(x[:0], w).shape == (0, 1100)
    assert linear_contract(x[:0], make_weight("F16", 3, 1024, rng)).shape == (0, 3)


@pytest.mark.parametrize("name", QUANTIZED)
def test_tiles_give_the_bits_of_the_rows(name):
    """Expectation: decision 003: tiles hold the same numbers, so products have the same bits."""
    rng = np.random.default_rng(TYPES[name].ggml_id)
    w = make_weight(name, 37, n_cols_of(name, 20), rng, scale=0.75)
    data = torch.from_numpy(encode(name, w.data.numpy()))
    tiles = Weight(name, w.n_rows, w.n_cols, data, 0.75, "tiles")
    x = torch.from_numpy(rng.standard_normal((3, w.n_cols)).astype(np.float32))
    same_bits(linear_contract(x, tiles), linear_contract(x, w))
    assert torch.equal(linear(x, tiles, torch.float64), linear(x, w, torch.float64))
    cut = Weight(name, w.n_rows, w.n_cols, data[:-128], 0.75, "tiles")
    with pytest.raises(AssertionError):
        linear_contract(x, cut)
