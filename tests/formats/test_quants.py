"""Decoders against ggml (package libggml-python), bit for bit, and exact re-codings."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import ggml_ref

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.quants import (
    DECODERS,
    decode,
    dequantize,
    fp8_b128_rows,
    mxfp4_from_gptoss,
    quantize_q8_0,
)
from strata.formats.weight_types import TYPES

QUANTIZED = [t for t in TYPES.values() if t.kind == "quantized"]
# ggml spends 5 to 20 s on search tables before its first block of these
SLOW_TO_QUANTIZE = {"IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS", "IQ2_XXS"}
SOAK = pytest.mark.soak
by_name = pytest.mark.parametrize("weight_type", QUANTIZED, ids=lambda t: t.name)


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def test_every_quantized_type_has_a_decoder():
    """Expectation: the table of types."""
    assert set(DECODERS) == {t.name for t in QUANTIZED}


@by_name
def test_equals_ggml_on_random_bytes(weight_type):
    """Expectation: ggml's dequantize_row. 2,000 blocks reach every grid entry and sign pattern."""
    rng = np.random.default_rng(weight_type.ggml_id)
    raw = ggml_ref.random_raw(weight_type, 4, 500 * weight_type.block_weights, rng)
    expected = ggml_ref.dequantize(weight_type.name, raw)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(bits(dequantize(weight_type, raw)), bits(expected))


@pytest.mark.parametrize(
    "name",
    [pytest.param(t.name, marks=SOAK if t.name in SLOW_TO_QUANTIZE else ()) for t in QUANTIZED],
)
def test_equals_ggml_on_quantized_data(name):
    """Expectation: ggml's dequantize_row on what ggml's quantizer made of normal numbers."""
    x = np.random.default_rng(1).normal(0, 0.02, (3, 1280)).astype(np.float32)
    raw = ggml_ref.quantize(name, x)
    y = dequantize(TYPES[name], raw)
    np.testing.assert_array_equal(bits(y), bits(ggml_ref.dequantize(name, raw)))
    # the values are indeed the data's: a ternary type is off by 0.83 of the deviation
    assert np.sqrt(np.mean((y - x) ** 2)) < 0.9 * 0.02


@by_name
def test_codes_are_the_contracts(weight_type):
    """Contract 2: w = c * s - m with whole-group scales; expectation: ggml's values."""
    rng = np.random.default_rng(2)
    raw = ggml_ref.random_raw(weight_type, 3, 512, rng)
    c = decode(weight_type, raw)
    assert c.codes.dtype == np.int8 and c.codes.shape == (3, 512)
    assert c.scale.dtype == np.float32 and c.scale.shape == (3, 512 // weight_type.group)
    assert (c.minimum is not None) == weight_type.has_min
    w = c.codes.reshape(3, -1, weight_type.group) * np.float64(c.scale)[:, :, None]
    if c.minimum is not None:
        assert c.minimum.shape == c.scale.shape
        w = w - c.minimum[:, :, None]
    expected = ggml_ref.dequantize(weight_type.name, raw)
    np.testing.assert_array_equal(w.astype(np.float32).reshape(3, -1), expected)


def test_mxfp4_every_exponent():
    """Expectation: ggml, for all 256 exponent bytes and all 16 codes, subnormal to overflow."""
    raw = np.empty((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 17
    y = dequantize(TYPES["MXFP4"], raw)
    np.testing.assert_array_equal(bits(y), bits(ggml_ref.dequantize("MXFP4", raw)))


def test_nvfp4_every_scale_byte():
    """Expectation: ggml, for all 256 scale bytes and all 16 codes."""
    raw = np.empty((256, 36), np.uint8)
    raw[:, :4] = np.arange(256)[:, None] + np.array([0, 64, 128, 192])
    raw[:, 4:] = np.tile(np.arange(16) * 17, 2)
    y = dequantize(TYPES["NVFP4"], raw)
    np.testing.assert_array_equal(bits(y), bits(ggml_ref.dequantize("NVFP4", raw)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
    ],
)
def test_small_floats_every_pattern(name, dtype):
    """Expectation: torch's conversion to f32, for every bit pattern (any NaN for NaN)."""
    width = TYPES[name].block_bytes
    raw = np.arange(256**width, dtype=np.uint32).astype(f"<u{width}").view(np.uint8)
    expected = torch.from_numpy(raw).view(dtype).float().numpy()
    y = dequantize(TYPES[name], raw.reshape(2, -1)).reshape(-1)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(y), nan)
    np.testing.assert_array_equal(bits(y)[~nan], bits(expected)[~nan])


def test_wide_floats():
    """Expectation: the numbers themselves; F64 rounds to the nearest f32."""
    x = np.array([[1.5, -0.0, 3e38], [1 + 2**-24 + 2**-50, 1e300, -1e-46]])
    as_f32 = np.array([[1.5, -0.0, 3e38], [1 + 2**-23, np.inf, -0.0]], np.float32)
    np.testing.assert_array_equal(bits(dequantize(TYPES["F64"], x.view(np.uint8))), bits(as_f32))
    same = dequantize(TYPES["F32"], as_f32.view(np.uint8))
    np.testing.assert_array_equal(bits(same), bits(as_f32))


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_S", "BF16"])
def test_memory_beyond_the_result_is_bounded(name):
    """Expectation: a fixed allowance of 48 MiB, while the result alone takes 64 MiB."""
    raw = np.zeros((4096, TYPES[name].row_bytes(4096)), np.uint8)
    tracemalloc.start()
    try:
        y = dequantize(TYPES[name], raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - y.nbytes < 48 << 20


def test_rows_that_are_strided_views():
    """A row slice of a larger buffer decodes like its copy."""
    rng = np.random.default_rng(3)
    wide = ggml_ref.random_raw(TYPES["Q5_K"], 6, 1024, rng)
    part = wide[::2, 176 : 3 * 176]
    expected = ggml_ref.dequantize("Q5_K", part)
    np.testing.assert_array_equal(bits(dequantize(TYPES["Q5_K"], part)), bits(expected))
    assert dequantize(TYPES["Q5_K"], wide[:0]).shape == (0, 1024)


def test_refusals():
    """Damaged input gives one clear line with the values (house rule for errors)."""
    with pytest.raises(FormatError, match=r"Q4_K.*multiple of 144"):
        decode(TYPES["Q4_K"], np.zeros((2, 143), np.uint8))
    with pytest.raises(FormatError, match="F16"):
        dequantize(TYPES["F16"], np.zeros((2, 3), np.uint8))
    with pytest.raises(UnsupportedError, match="BF16 has no integer codes"):
        decode(TYPES["BF16"], np.zeros((2, 4), np.uint8))
    with pytest.raises(UnsupportedError, match="I32 holds integers"):
        dequantize(TYPES["I32"], np.zeros((2, 4), np.uint8))


@settings(max_examples=60, deadline=None)
@example(seed=264, rows=2, n_blocks=2, exponent=-122, ties=False)  # a subnormal scale
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    n_blocks=st.integers(1, 7),
    exponent=st.integers(-140, 21),
    ties=st.booleans(),
)
def test_q8_0_bytes_equal_ggml(seed, rows, n_blocks, exponent, ties):
    """Expectation: ggml_quantize_chunk, incl. exact halves, zero blocks and subnormal scales."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 32 * n_blocks)).clip(-3, 3)
    if ties:  # halves of a power-of-two step: amax 127 steps, values on the .5 grid
        x = rng.integers(-254, 255, x.shape) / 2.0
        x[:, ::32] = 127
    x = np.ldexp(x, exponent - 7 * ties).astype(np.float32)
    x[0, :32] *= rng.integers(0, 2)
    np.testing.assert_array_equal(quantize_q8_0(x), ggml_ref.quantize("Q8_0", x))


def test_q8_0_refusals():
    """What Q8_0 cannot hold is refused instead of written as infinity."""
    with pytest.raises(FormatError, match="33 columns"):
        quantize_q8_0(np.zeros((1, 33), np.float32))
    for bad in (np.nan, np.inf, 1e7):
        x = np.zeros((1, 32), np.float32)
        x[0, 5] = bad
        with pytest.raises(FormatError, match="f16 scale"):
            quantize_q8_0(x)


def test_mxfp4_from_gptoss():
    """Expectation: e2m1 value * 2^(scale - 127), byte j = weights 2j (low half) and 2j + 1."""
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (2, 5, 3, 16), np.uint8)
    scales = rng.integers(100, 140, (2, 5, 3), np.uint8)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    nibble = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(2, 5, 3, 32)
    expected = np.ldexp(e2m1[nibble], scales[..., None].astype(np.int64) - 127).reshape(2, 5, 96)
    rows = mxfp4_from_gptoss(blocks, scales)
    assert rows.shape == (2, 5, 3 * 17)
    y = dequantize(TYPES["MXFP4"], rows.reshape(10, -1)).reshape(2, 5, 96)
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(FormatError, match=r"\[2, 5, 3, 16\] and scales \[2, 5\]"):
        mxfp4_from_gptoss(blocks, scales[..., 0])


def test_fp8_b128_rows():
    """Expectation: torch's e4m3 values times the scale of their 128 x 128 block, in f32."""
    rng = np.random.default_rng(5)
    weight = rng.integers(0, 127, (200, 384), np.uint8)
    weight[::2] |= 128
    scale = rng.random((2, 3)).astype(np.float32)
    rows = fp8_b128_rows(weight, scale)
    assert rows.shape == (200, TYPES["F8_E4M3_B128"].row_bytes(384))
    value = torch.from_numpy(weight).view(torch.float8_e4m3fn).float()
    factor = torch.from_numpy(scale).repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    y = dequantize(TYPES["F8_E4M3_B128"], rows)
    np.testing.assert_array_equal(bits(y), bits((value * factor).numpy()))
    with pytest.raises(UnsupportedError, match=r"\[2, 130\].*128"):
        fp8_b128_rows(np.zeros((2, 130), np.uint8), np.ones((1, 2), np.float32))
    with pytest.raises(FormatError, match=r"scales \[1, 3\], expected \[2, 3\]"):
        fp8_b128_rows(weight, scale[:1])
