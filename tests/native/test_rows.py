"""Row kernels: the contract's bits for every type, instruction set, row count and shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.errors import EngineError, FormatError, UnsupportedError
from strata.formats import quants
from strata.formats.weight_types import TYPES
from strata.kernels import numerics
from strata.kernels.linear import linear_contract
from strata.kernels.weight import Weight
from strata.native import dequantize, quantize_activations
from strata.native.extension import _native
from strata.native.rows import KERNEL_TYPES
from tests import ggml_ref
from tests.kernels.test_linear import make_weight, n_cols_of, same_bits
from tests.native.kit import ISAS, pool

ALL = sorted(KERNEL_TYPES)


def activations(n_tokens: int, n_cols: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, one of them with an all-zero block."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n_cols)) * np.exp(rng.normal(0, 3, (n_tokens, 1)))
    x[0, :32] = 0
    return torch.from_numpy(x.astype(np.float32))


def product(w: Weight, x: torch.Tensor, isa: str, workers: int = 1) -> torch.Tensor:
    """pool.linear into memory full of NaN."""
    out = torch.full((len(x), w.n_rows), float("nan"))
    return pool(isa, workers).linear(w, x, out)


def test_kernels_know_every_weight_type() -> None:
    """Expectation: the one table of weight types."""
    assert set(ALL) == {t.name for t in TYPES.values() if t.kind != "integer"}
    for name, *numbers in _native.type_table():
        t = TYPES[name]
        assert numbers == [t.block_weights, t.block_bytes, t.group, t.has_min], name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ALL)
def test_decoders_equal_the_format(name: str, isa: str) -> None:
    """Expectation: formats.quants (tested against ggml), on random bytes."""
    t = TYPES[name]
    n_blocks = max(1, 768 // t.block_weights)
    raw = np.random.default_rng(3).integers(0, 256, (24, n_blocks * t.block_bytes), np.uint8)
    same_bits(dequantize(name, raw, isa), quants.dequantize(t, raw))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ALL)
def test_bits_for_1_to_16_rows(name: str, isa: str) -> None:
    """Expectation: linear_contract; 19 weight rows, 13 blocks where the type allows it."""
    n_cols = n_cols_of(name, 13)
    w = make_weight(name, 19, n_cols, np.random.default_rng(1), 0.7 if name == "NVFP4" else 1.0)
    x = activations(16, n_cols, 2)
    expected = linear_contract(x, w)
    for n_tokens in range(1, 17):
        same_bits(product(w, x[:n_tokens], isa), expected[:n_tokens])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(ALL),
    isa=st.sampled_from(ISAS),
    workers=st.sampled_from([1, 2, 3, 7]),
    n_blocks=st.integers(1, 40),
    n_rows=st.integers(1, 70),
    n_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_bits_for_odd_shapes(name, isa, workers, n_blocks, n_rows, n_tokens, seed) -> None:
    """Expectation: linear_contract, whatever the shape and the number of workers."""
    n_cols = n_cols_of(name, n_blocks)
    w = make_weight(name, n_rows, n_cols, np.random.default_rng(seed))
    x = activations(n_tokens, n_cols, seed)
    same_bits(product(w, x, isa, workers), linear_contract(x, w))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F8_E4M3"])
def test_float_rows_of_any_width(name: str, isa: str) -> None:
    """Expectation: linear_contract, which pads to whole 32s; also from an odd address."""
    for n_cols in (1, 7, 31, 33, 64, 100):
        w = make_weight(name, 5, n_cols, np.random.default_rng(n_cols))
        memory = torch.empty(w.data.numel() + 1, dtype=torch.uint8)
        moved = memory[1:].view(w.data.shape)
        moved.copy_(w.data)
        x = activations(3, n_cols, 4)
        expected = linear_contract(x, w)
        same_bits(product(w, x, isa), expected)
        same_bits(product(Weight(name, 5, n_cols, moved), x, isa), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_wild_weights_keep_the_bits(isa: str) -> None:
    """Expectation: linear_contract on any bytes: scales that are NaN, infinite, subnormal or -0."""
    rng = np.random.default_rng(8)
    for name in ALL:
        t = TYPES[name]
        n_cols = n_cols_of(name, 3)
        raw = torch.from_numpy(rng.integers(0, 256, (40, t.row_bytes(n_cols)), np.uint8))
        w = Weight(name, 40, n_cols, raw)
        x = activations(5, n_cols, 9)
        same_bits(product(w, x, isa), linear_contract(x, w))


@pytest.mark.parametrize("isa", ISAS)
def test_activation_quantizer(isa: str) -> None:
    """Expectation: kernels.numerics; C18 (a): 1e6 and more stay finite; NaN, infinity, dust."""
    x = activations(12, 32 * 11, 5).numpy()
    x[1] *= 1e6 / np.abs(x[1]).max()
    x[2] *= 3e38 / np.abs(x[2]).max()
    x[3, 40], x[4, 70], x[5, 100] = np.nan, np.inf, -np.inf
    x[6] *= np.float32(2.0**-100) / np.abs(x[6]).max()
    x[7] = np.float32(1e-42)
    q, scale, half = quantize_activations(x, isa)
    expected_q, expected_scale = numerics.quantize_activations(x)
    np.testing.assert_array_equal(q, expected_q)
    same_bits(scale, expected_scale)
    np.testing.assert_array_equal(half, numerics.group_sums(q, 16))
    assert np.isfinite(scale[1:3]).all() and np.isnan(scale[3, 1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F16"])
def test_large_activations_and_nan(name: str, isa: str) -> None:
    """C18 (a) through a product: 1e6 gives finite rows; a NaN fills its own rows and no other."""
    n_cols = n_cols_of(name, 8)
    w = make_weight(name, 33, n_cols, np.random.default_rng(6))
    x = activations(3, n_cols, 7)
    x[0] = 1e6
    x[1, 5] = float("nan")
    y = product(w, x, isa, 2)
    assert torch.isfinite(y[0]).all() and torch.isnan(y[1]).all() and torch.isfinite(y[2]).all()


def test_many_rows_of_a_ggml_type_are_near_ggml() -> None:
    """Expectation: ggml's dequantization times x in float64, within the int8 rounding of x."""
    t = TYPES["Q6_K"]
    raw = ggml_ref.random_raw(t, 64, 512, np.random.default_rng(1))
    x = activations(2, 512, 3)
    y = product(Weight("Q6_K", 64, 512, torch.from_numpy(raw)), x, "auto", 2).double()
    w = torch.from_numpy(quants.dequantize(t, raw)).double()
    # half a step of amax / 127 for each activation
    bound = (w.abs().sum(1) * x.abs().max(1, keepdim=True).values.double()) / 254
    assert ((y - x.double() @ w.T).abs() <= 1.01 * bound + 1e-6).all()


def test_empty_window() -> None:
    """No tokens, no rows; expectation: the shape."""
    w = make_weight("Q4_0", 5, 64, np.random.default_rng(0))
    assert pool().linear(w, torch.empty(0, 64)).shape == (0, 5)


@pytest.mark.parametrize("workers", [1, 3])
def test_products_at_once_are_the_products_one_by_one(workers: int) -> None:
    """Float and quantized matrices of one width; expectation: ``linear`` of each, bit for bit."""
    rng = np.random.default_rng(2)
    kinds = (("Q8_0", 300), ("BF16", 8), ("Q4_K", 17), ("F32", 70))
    ws = [make_weight(kind, n_rows, 256, rng) for kind, n_rows in kinds]
    for n_tokens in (1, 2, 9, 40):
        x = activations(n_tokens, 256, n_tokens)
        outs = [torch.full((n_tokens, w.n_rows), float("nan")) for w in ws]
        outs[0] = outs[0].view(n_tokens, 3, 100)
        pool("auto", workers).linears(ws, x, outs)
        for w, out in zip(ws, outs, strict=True):
            assert torch.equal(out.view(n_tokens, -1), pool("portable", 1).linear(w, x))
    with pytest.raises(EngineError, match="matrices of 256 and 64 columns"):
        pool().linears([ws[0], make_weight("F32", 4, 64, rng)], x, outs[:2])


def test_refusals() -> None:
    """What the extension must not point at is refused. Expectation: one clear line."""
    w = make_weight("Q4_0", 5, 64, np.random.default_rng(0))
    with pytest.raises(EngineError, match=r"linear: x is .*\[2, 32\] on cpu, expected .*\[2, 64\]"):
        pool().linear(w, torch.zeros(2, 32))
    with pytest.raises(EngineError, match="non-contiguous"):
        pool().linear(w, torch.zeros(64, 2).T)
    with pytest.raises(EngineError, match="float64"):
        pool().linear(w, torch.zeros(2, 64, dtype=torch.float64))
    with pytest.raises(EngineError, match="linear: weight"):
        pool().linear(Weight("Q4_0", 6, 64, w.data), torch.zeros(2, 64))
    with pytest.raises(EngineError, match="multiple of Q4_K"):
        pool().linear(Weight("Q4_K", 5, 64, w.data), torch.zeros(2, 64))
    with pytest.raises(UnsupportedError, match="I32"):
        pool().linear(Weight("I32", 5, 64, w.data), torch.zeros(2, 64))
    with pytest.raises(FormatError, match="not rows of Q4_0"):
        dequantize("Q4_0", np.zeros((2, 17), np.uint8))
    with pytest.raises(FormatError, match="width 48"):
        quantize_activations(np.zeros((1, 48), np.float32))
