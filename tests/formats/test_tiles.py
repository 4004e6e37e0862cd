"""Tiles against the decoders of rows: same codes, scales and minima, in decision 003's layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import ggml_ref

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.quants import decode, dequantize
from strata.formats.tiles import (
    decode_tiles,
    dequantize_tiles,
    encode,
    encode_into,
    tile_format,
    tile_plan,
)
from strata.formats.weight_types import TYPES

QUANTIZED = sorted(t.name for t in TYPES.values() if t.kind == "quantized")
SLOW_TO_QUANTIZE = {"IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS", "IQ2_XXS"}
FAST_TO_QUANTIZE = [n for n in QUANTIZED if n not in SLOW_TO_QUANTIZE]
WIDTHS = (32, 64, 640, 768, 2560)


def widths(name):
    """The widths of WIDTHS that are whole blocks."""
    return [n for n in WIDTHS if n % TYPES[name].block_weights == 0]


def same(tiles, rows):
    """Equal bit for bit, so that NaN and -0 count."""
    np.testing.assert_array_equal(tiles.codes, rows.codes)
    np.testing.assert_array_equal(tiles.scale.view(np.uint32), rows.scale.view(np.uint32))
    assert (tiles.minimum is None) == (rows.minimum is None)
    if rows.minimum is not None:
        np.testing.assert_array_equal(tiles.minimum.view(np.uint32), rows.minimum.view(np.uint32))


def any_bytes(name, rows, n, seed):
    """Rows of random bytes: any scale, incl. NaN, infinity, subnormals."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, TYPES[name].row_bytes(n)), np.uint8)


def number_at(name, blob, n_rows, n_cols, row, col):
    """(c, s_w, m_w) of one weight, read by the text of decision 003, byte by byte."""
    form, plan = tile_format(name), tile_plan(name, n_rows, n_cols)
    t, r, b, k = row // 16, row % 16, col // 32, col % 32
    per_word, run = 32 // form.bits, 4 * (8 // form.bits)
    assert run == per_word
    j, inside = k // run, k % run
    words = 32 // run
    byte = plan.codes + 4 * (((t * (n_cols // 32) + b) * words + j) * 16 + r) + inside % 4
    u = int(blob[byte]) >> (form.bits * (inside // 4)) & (2**form.bits - 1)
    c = form.table[u] if form.table is not None else form.mul * u - form.bias

    def f16(at):
        return np.float32(blob[at : at + 2].view(np.float16)[0])

    def scale_at(plane, super_half):
        if form.scale == "F16":
            units = -(-(n_cols // 32) // form.scale_blocks)
            return f16(plane + 2 * ((t * units + b // form.scale_blocks) * 16 + r))
        unit = col // form.group
        small = int(blob[plane + (t * (n_cols // form.group) + unit) * 16 + r])
        if form.scale == "E8M0":
            return np.ldexp(np.float32(1), small - 128)
        if form.scale == "UE4M3":
            exponent, mantissa = small >> 3, small & 7
            normal = exponent > 0
            return np.float32(np.ldexp(8 * normal + mantissa, max(exponent, 1) - 11))
        small = small - 256 if form.signed and small > 127 else small
        n_supers = n_cols // 256
        half = super_half * plan.tile_rows * n_supers * 32
        d = f16(plan.supers + half + 2 * ((t * n_supers + col // 256) * 16 + r))
        return d * np.float32(form.factor) * np.float32(small)

    s = scale_at(plan.scales, 0)
    m = scale_at(plan.minimums, 1) if form.has_min else np.float32(0)
    return c, s, m


def test_every_quantized_type_has_tiles_and_no_other():
    """Expectation: the table of types; floats and integers stay as stored (decision 003)."""
    for kind in TYPES.values():
        assert (tile_format(kind.name) is not None) == (kind.kind == "quantized")
    with pytest.raises(UnsupportedError, match="BF16 has no tiles"):
        tile_plan("BF16", 16, 32)


@pytest.mark.parametrize("name", QUANTIZED)
def test_round_trip_of_any_bytes(name):
    """Expectation: quants.decode of the rows, for rows no multiple of 16 and every width."""
    for n in widths(name):
        for rows in (1, 16, 37):
            raw = any_bytes(name, rows, n, seed=rows * n)
            blob = encode(name, raw)
            with np.errstate(all="ignore"):
                expected = decode(TYPES[name], raw)
            same(decode_tiles(name, blob, rows, n), expected)


@pytest.mark.parametrize("name", FAST_TO_QUANTIZE)
def test_quantized_data_keeps_ggmls_values(name):
    """Expectation: ggml's dequantize_row of ggml's own quantization, bit for bit."""
    x = np.random.default_rng(7).normal(0, 0.02, (19, 768)).astype(np.float32)
    raw = ggml_ref.quantize(name, x)
    blob, expected = encode(name, raw), ggml_ref.dequantize(name, raw)
    for rows in (slice(None), slice(3, 18), slice(17, 19), slice(5, 5)):
        w = dequantize_tiles(name, blob, 19, 768, rows)
        np.testing.assert_array_equal(w.view(np.uint32), expected[rows].view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_weight_lies_where_the_decision_says(name):
    """Expectation: decision 003 read byte by byte; values from quants.decode."""
    n, rows = widths(name)[-1], 21
    rng = np.random.default_rng(3)
    raw = ggml_ref.random_raw(TYPES[name], rows, n, rng)
    blob, expected = encode(name, raw), decode(TYPES[name], raw)
    group = TYPES[name].group
    for row, col in zip(rng.integers(0, rows, 300), rng.integers(0, n, 300), strict=True):
        c, s, m = number_at(name, blob, rows, n, row, col)
        assert c == expected.codes[row, col]
        assert s == expected.scale[row, col // group]
        if expected.minimum is not None:
            assert m == expected.minimum[row, col // group]


@pytest.mark.parametrize("name", QUANTIZED)
def test_padding_rows_are_zero_bytes_and_planes_are_aligned(name):
    """Expectation: decision 003: planes on multiples of 128 bytes, padding rows of zero bytes."""
    n, rows = widths(name)[0], 17
    plan, form = tile_plan(name, rows, n), tile_format(name)
    starts = [plan.codes, plan.scales, plan.minimums, plan.supers, plan.n_bytes]
    starts = [s for s in starts if s >= 0]
    assert starts == sorted(starts) and all(s % 128 == 0 for s in starts)
    assert plan.tile_rows == 2 and plan.n_blocks == n // 32
    blob = np.full(plan.n_bytes, 0xAB, np.uint8)
    encode_into(name, any_bytes(name, rows, n, seed=1), blob)
    # the second tile row holds one row: lanes 1 to 15 of its words are padding
    words = blob[: plan.scales].view("<u4").reshape(2, -1, 16)
    assert not words[1, :, 1:].any()
    kind = "<u2" if form.scale == "F16" else "u1"
    scales = blob[plan.scales :].view(kind)[: 32 * form.units(n)].reshape(2, -1, 16)
    assert not scales[1, :, 1:].any()


BITS_A_WEIGHT = {
    "Q8_0": 8.5, "Q4_0": 4.5, "IQ4_NL": 4.5, "Q4_K": 4.625, "IQ3_S": 4.3125, "IQ3_XXS": 4.3125,
    "IQ2_XXS": 4.3125, "IQ4_XS": 4.3125, "IQ2_S": 4.5625, "MXFP4": 4.25, "Q2_0": 2.25,
    "Q6_K": 8.5625,
}  # fmt: skip


@pytest.mark.parametrize("name", BITS_A_WEIGHT)
def test_bits_a_weight(name):
    """Expectation: the table in decision 003, for a matrix of 512 x 2560."""
    assert tile_plan(name, 512, 2560).n_bytes * 8 == BITS_A_WEIGHT[name] * 512 * 2560


def test_extremes():
    """Q8_0's code -128, every MXFP4 exponent, every NVFP4 scale byte; from quants.decode."""
    q8 = np.zeros((1, 34), np.uint8)
    q8[0, :2] = np.array([1.5], np.float16).view(np.uint8)
    q8[0, 2:] = np.arange(112, 144)
    assert decode_tiles("Q8_0", encode("Q8_0", q8), 1, 32).codes.min() == -128
    mxfp4 = np.empty((256, 17), np.uint8)
    mxfp4[:, 0], mxfp4[:, 1:] = np.arange(256), np.arange(16) * 17
    same(decode_tiles("MXFP4", encode("MXFP4", mxfp4), 256, 32), decode(TYPES["MXFP4"], mxfp4))
    nvfp4 = np.empty((256, 36), np.uint8)
    nvfp4[:, :4], nvfp4[:, 4:] = np.arange(256)[:, None], np.tile(np.arange(16) * 17, 2)
    blob = encode("NVFP4", nvfp4)
    same(decode_tiles("NVFP4", blob, 256, 64), decode(TYPES["NVFP4"], nvfp4))
    # a kernel needs no exceptions: the top bit is gone and 0x7f means 240
    assert blob[tile_plan("NVFP4", 256, 64).scales :].max() == 0x7F


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(QUANTIZED),
    rows=st.integers(0, 70),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_of_odd_shapes(name, rows, blocks, seed):
    """Expectation: quants.decode, for any number of rows and blocks."""
    n = blocks * TYPES[name].block_weights
    raw = any_bytes(name, rows, n, seed)
    blob = encode(name, raw)
    assert blob.shape == (tile_plan(name, rows, n).n_bytes,)
    with np.errstate(all="ignore"):
        same(decode_tiles(name, blob, rows, n), decode(TYPES[name], raw))


def test_large_matrices_go_in_pieces_and_strided_rows_work():
    """Expectation: quants.decode, across piece borders (about a million weights)."""
    raw = any_bytes("IQ4_NL", 1033, 2560, seed=5)[:, : TYPES["IQ4_NL"].row_bytes(2400)]
    same(
        decode_tiles("IQ4_NL", encode("IQ4_NL", raw), 1033, 2400),
        decode(TYPES["IQ4_NL"], np.ascontiguousarray(raw)),
    )
    assert np.isfinite(dequantize(TYPES["IQ4_NL"], raw[:1] & 0x3B)).all()


def test_refusals():
    """Damaged input gives one clear line with the values (house rule for errors)."""
    with pytest.raises(FormatError, match="96 columns.*256.*Q4_K"):
        tile_plan("Q4_K", 16, 96)
    with pytest.raises(FormatError, match=r"\[100\].*Q8_0 matrix \[16, 32\].*\[640\]"):
        decode_tiles("Q8_0", np.zeros(100, np.uint8), 16, 32)
    with pytest.raises(UnsupportedError, match="F16 has no tiles"):
        encode("F16", np.zeros((2, 64), np.uint8))
