"""The expert's feed-forward from its blob: layout rules, bits of the contract, plain reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.quants import dequantize
from strata.formats.tiles import encode, tile_plan
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import expert_rows_contract, expert_rows_plain, layout
from tests import ggml_ref
from tests.kernels import scalar_contract as scalar
from tests.kernels.test_linear import make_weight, same_bits, scalar_products

STORED = sorted(t.name for t in TYPES.values() if t.kind != "integer")
LAYOUT = st.sampled_from(["native", "tiles"])


def fill(shape, rng):
    """A blob of that shape with finite weights; gaps are filled with 0xff (NaN bytes)."""
    blob = np.full(shape.blob_bytes, 0xFF, np.uint8)
    d, f = shape.d_model, shape.d_expert
    parts = {}
    for name, kind, rows, cols, offset in (
        ("gate", shape.gate_type, f, d, shape.gate_offset),
        ("up", shape.up_type, f, d, shape.up_offset),
        ("down", shape.down_type, d, f, shape.down_offset),
    ):
        parts[name] = make_weight(kind, rows, cols, rng)
        raw = parts[name].data.numpy()
        if getattr(shape, name + "_layout") == "tiles":
            raw = encode(kind, raw)
        blob[offset : offset + raw.size] = raw.reshape(-1)
    for name, count, offset in (
        ("gate_bias", f, shape.gate_bias_offset),
        ("up_bias", f, shape.up_bias_offset),
        ("down_bias", d, shape.down_bias_offset),
        ("scales", 3, shape.scale_offset),
    ):
        if offset >= 0:
            parts[name] = rng.uniform(0.5, 1.5, count).astype(np.float32)
            blob[offset : offset + 4 * count] = parts[name].view(np.uint8)
    return torch.from_numpy(blob), parts


def by_hand(shape, parts, x):
    """Contract 5 from the pieces (not the blob), one number at a time."""
    scales = parts.get("scales", np.ones(3, np.float32))

    def product(name, rows, i):
        y = scalar_products(rows, parts[name]) * scales[i]
        return y + parts[name + "_bias"] if name + "_bias" in parts else y

    g, u = product("gate", x, 0), product("up", x, 1)
    if shape.activation == "swiglu_oai":
        pairs = zip(g.flat, u.flat, strict=True)
        h = np.array([scalar.swiglu_oai(a, b, shape.swiglu_limit) for a, b in pairs])
    else:
        h = np.array([scalar.silu(a) * b for a, b in zip(g.flat, u.flat, strict=True)])
    return product("down", h.reshape(g.shape).astype(np.float32), 2)


CASES = [
    (64, 96, ("Q8_0", "Q4_0", "Q5_1"), False, False, "silu"),
    (96, 32, ("MXFP4", "MXFP4", "MXFP4"), True, False, "swiglu_oai"),
    (64, 64, ("NVFP4", "NVFP4", "NVFP4"), True, True, "silu"),
    (40, 24, ("F16", "BF16", "F32"), False, True, "swiglu_oai"),
    (64, 33, ("IQ4_NL", "Q2_0", "F32"), False, False, "silu"),
    (256, 256, ("Q2_K", "IQ3_S", "Q6_K"), False, False, "silu"),
]


@pytest.mark.parametrize(("d", "f", "types", "bias", "scales", "activation"), CASES)
def test_contract_rows_equal_scalar_transcription(d, f, types, bias, scales, activation):
    """Expectation: contract 5 by the scalar transcription, from the pieces put into the blob."""
    rng = np.random.default_rng(d + f)
    shape = layout(d, f, types, bias=bias, scales=scales, activation=activation, swiglu_limit=3.0)
    blob, parts = fill(shape, rng)
    x = rng.standard_normal((1 if d == 256 else 2, d)).astype(np.float32)
    y = expert_rows_contract(shape, blob, torch.from_numpy(x))
    same_bits(y, by_hand(shape, parts, x))
    one = expert_rows_contract(shape, blob, torch.from_numpy(x[-1:].copy()))
    same_bits(y[-1:], one)


@pytest.mark.parametrize(("d", "f", "types", "bias", "scales", "activation"), CASES)
def test_tiles_give_the_bits_of_the_rows(d, f, types, bias, scales, activation):
    """Expectation: decision 003: tiles are the same numbers, so products have the same bits."""
    tiled = ["native" if TYPES[t].kind == "float" else "tiles" for t in types]
    form = {"bias": bias, "scales": scales, "activation": activation, "swiglu_limit": 3.0}
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((3, d)).astype(np.float32))
    native = layout(d, f, types, **form)
    blob, _ = fill(native, np.random.default_rng(9))
    expected = expert_rows_contract(native, blob, x)
    plain = expert_rows_plain(native, blob, x, torch.float64)
    one, none = ("native", tiled[1], "native"), ("native",) * 3
    for layouts in (tuple(tiled), one, (tiled[0], "native", tiled[2])):
        shape = layout(d, f, types, layouts=layouts, **form)
        assert shape.layouts == layouts and (shape == native) == (layouts == none)
        blob, _ = fill(shape, np.random.default_rng(9))
        same_bits(expert_rows_contract(shape, blob, x), expected)
        assert torch.equal(expert_rows_plain(shape, blob, x, torch.float64), plain)


@pytest.mark.parametrize(("d", "f", "types", "bias", "scales", "activation"), CASES)
def test_plain_rows(d, f, types, bias, scales, activation):
    """Expectation: the formulas of the models' papers in f64, from the pieces."""
    rng = np.random.default_rng(1)
    shape = layout(d, f, types, bias=bias, scales=scales, activation=activation, swiglu_limit=3.0)
    blob, parts = fill(shape, rng)
    x = rng.standard_normal((3, d))
    scale = np.float64(parts.get("scales", np.ones(3)))

    def product(name, rows, i):
        w = parts[name]
        matrix = np.float64(dequantize(TYPES[w.type], w.data.numpy()))
        return rows @ matrix.T * scale[i] + np.float64(parts.get(name + "_bias", 0.0))

    g, u = product("gate", x, 0), product("up", x, 1)
    with np.errstate(over="ignore"):
        if activation == "swiglu_oai":
            g, u = np.minimum(g, 3), np.clip(u, -3, 3)
            h = g / (1 + np.exp(-1.702 * g)) * (u + 1)
        else:
            h = g / (1 + np.exp(-g)) * u
    expected = product("down", h, 2)
    y = expert_rows_plain(shape, blob, torch.from_numpy(x), torch.float64)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-10, atol=1e-12 * abs(expected).max())
    y32 = expert_rows_plain(shape, blob, torch.from_numpy(x), torch.float32)
    assert y32.dtype == torch.float32
    np.testing.assert_allclose(y32.numpy(), expected, rtol=1e-3, atol=1e-5 * abs(expected).max())


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4", "F16", "F32"]),
    d_blocks=st.integers(1, 9),
    f_blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_contract_rows_are_near_the_plain_rows(name, d_blocks, f_blocks, seed):
    """Expectation: f64 rows; int8 activations cost about 1/2 step of 127 twice, floats nothing."""
    rng = np.random.default_rng(seed)
    d, f = 32 * d_blocks, 32 * f_blocks
    w = rng.normal(0, 0.05, (2 * f, d)).astype(np.float32)
    v = rng.normal(0, 0.05, (d, f)).astype(np.float32)
    shape = layout(d, f, (name, name, name))
    blob = np.zeros(shape.blob_bytes, np.uint8)
    for offset, matrix in (
        (shape.gate_offset, w[:f]),
        (shape.up_offset, w[f:]),
        (shape.down_offset, v),
    ):
        if name == "F32":
            raw = matrix.view(np.uint8)
        elif name == "F16":
            raw = matrix.astype(np.float16).view(np.uint8)
        else:
            raw = ggml_ref.quantize(name, matrix)
        blob[offset : offset + raw.size] = raw.reshape(-1)
    x = torch.from_numpy(rng.standard_normal((4, d)).astype(np.float32))
    expected = expert_rows_plain(shape, torch.from_numpy(blob), x, torch.float64)
    error = expert_rows_contract(shape, torch.from_numpy(blob), x).double() - expected
    ratio = (error.norm() / expected.norm()).item()
    assert ratio < (0.04 if TYPES[name].kind == "quantized" else 1e-5)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "MXFP4", "F16"])
def test_extreme_activations(name):
    """C18a: 1e6 gives finite rows; a NaN reaches every number of its own row and no other row."""
    rng = np.random.default_rng(5)
    shape = layout(64, 64, (name, name, name))
    blob, _ = fill(shape, rng)
    x = torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32))
    x[0, 7], x[1, 9], x[2, 11] = 1e6, float("nan"), float("inf")
    y = expert_rows_contract(shape, blob, x)
    assert torch.isfinite(y[0]).all() and torch.isfinite(y[3]).all()
    assert torch.isnan(y[1]).all() and not torch.isfinite(y[2]).any()


@settings(max_examples=60, deadline=None)
@given(
    types=st.tuples(*[st.sampled_from(STORED)] * 3),
    layouts=st.tuples(LAYOUT, LAYOUT, LAYOUT),
    d=st.integers(1, 4).map(lambda i: 256 * i),
    f=st.integers(1, 4).map(lambda i: 256 * i),
    bias=st.booleans(),
    scales=st.booleans(),
)
def test_layout_places_pieces_apart_and_aligned(types, layouts, d, f, bias, scales):
    """Expectation: sizes from the tables of types and tiles; 64-byte alignment, 128 with tiles."""
    pairs = list(zip(types, layouts, strict=True))
    layouts = tuple("native" if TYPES[t].kind == "float" else how for t, how in pairs)
    s = layout(d, f, types, bias=bias, scales=scales, layouts=layouts)
    align = 128 if "tiles" in layouts else 64

    def size(i, rows, cols):
        if layouts[i] == "tiles":
            return tile_plan(types[i], rows, cols).n_bytes
        return rows * TYPES[types[i]].row_bytes(cols)

    pieces = [
        (s.gate_offset, size(0, f, d)),
        (s.up_offset, size(1, f, d)),
        (s.down_offset, size(2, d, f)),
    ]
    assert s.weight_bytes == sum(size for _, size in pieces)
    bias_offsets = (s.gate_bias_offset, s.up_bias_offset, s.down_bias_offset)
    if bias:
        pieces += zip(bias_offsets, (4 * f, 4 * f, 4 * d), strict=True)
    else:
        assert bias_offsets == (-1, -1, -1)
    if scales:
        pieces.append((s.scale_offset, 12))
    else:
        assert s.scale_offset == -1
    end = 0
    for offset, size in sorted(pieces):
        assert offset % align == 0 and offset >= end
        end = offset + size
    assert s.blob_bytes % align == 0 and 0 <= s.blob_bytes - end < align


def test_layout_refusals():
    """Shapes and types that contradict each other give one clear line (house rule for errors)."""
    with pytest.raises(FormatError, match="down matrix has 96 columns.*256.*Q4_K"):
        layout(256, 96, ("Q4_K", "Q4_K", "Q4_K"))
    with pytest.raises(UnsupportedError, match="up matrix has type 'I32'"):
        layout(64, 64, ("F32", "I32", "F32"))
    with pytest.raises(UnsupportedError, match="'relu'.*silu"):
        layout(64, 64, ("F32", "F32", "F32"), activation="relu")
    with pytest.raises(UnsupportedError, match="down matrix of type F16 has no tiles"):
        layout(64, 64, ("Q8_0", "Q8_0", "F16"), layouts=("tiles", "tiles", "tiles"))
