"""Contract arithmetic against C's fmaf and a scalar transcription of the contract."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.numerics import (
    exp_c,
    fma32,
    group_sums,
    quantize_activations,
    silu_c,
    swiglu_oai_c,
)
from tests.kernels import scalar_contract as scalar

f32 = np.float32
patterns = st.integers(0, 2**32 - 1)


def same_bits(got, expected):
    """Equal bits, any NaN for NaN."""
    got, expected = np.asarray(got, f32), np.asarray(expected, f32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def c_fma(a, b, c):
    return np.array([scalar.fmaf(*v) for v in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(patterns, patterns, patterns), min_size=1, max_size=8))
def test_fma32_any_bits(triples):
    """Expectation: C's fmaf on arbitrary bit patterns (subnormals, infinities, NaN, both zeros)."""
    a, b, c = np.array(triples, np.uint32).view(f32).T.copy()
    same_bits(fma32(a, b, c), c_fma(a, b, c))


def test_fma32_many_random_bits():
    """Expectation: C's fmaf."""
    a, b, c = np.random.default_rng(2).integers(0, 2**32, (3, 50_000), np.uint32).view(f32)
    same_bits(fma32(a, b, c), c_fma(a, b, c))


def near_ties(rng, n):
    """A tie of the f32 grid in one operand, a tiny part in the other: rounding twice fails."""
    odd = rng.integers(2**23, 2**24, n) | 1
    a = np.ldexp(odd.astype(f32), -24).astype(f32)
    b = f32(1) + np.ldexp(f32(1), -rng.integers(1, 24, n)).astype(f32)
    c = np.ldexp(rng.choice([-1.0, 1.0], n), -rng.integers(24, 140, n)).astype(f32)
    shift = rng.integers(-148, 127, n)
    swap = rng.random(n) < 0.3
    tiny = np.ldexp(f32(1), -rng.integers(25, 60, n)).astype(f32)
    a, c = np.where(swap, tiny, a), np.where(swap, a, c)
    with np.errstate(all="ignore"):
        return np.ldexp(a, shift).astype(f32), b.astype(f32), np.ldexp(c, shift).astype(f32)


def test_fma32_where_double_rounding_goes_wrong():
    """Expectation: fmaf; and the data do contain sums that f64-then-f32 gets wrong."""
    a, b, c = near_ties(np.random.default_rng(0), 40_000)
    expected = c_fma(a, b, c)
    same_bits(fma32(a, b, c), expected)
    with np.errstate(all="ignore"):
        naive = (np.float64(a) * b + c).astype(f32)
    wrong = np.sum(naive.view(np.uint32) != expected.astype(f32).view(np.uint32))
    assert wrong > 100


def test_fma32_edges_and_shapes():
    """Expectation: IEEE by hand: signed zeros, cancellation, overflow, smallest subnormal."""
    tiny, big = f32(2.0**-149), np.finfo(f32).max
    cases = [
        (f32(-1), f32(0), f32(0), 0.0),
        (f32(-1), f32(0), f32(-0.0), -0.0),
        (f32(3), f32(2), f32(-6), 0.0),
        (tiny, f32(0.5), f32(0), 0.0),
        (tiny, f32(0.5), tiny, 2 * 2.0**-149),
        (big, f32(2), f32(-np.inf), -np.inf),
        (big, f32(2), -big, big),
        (big, f32(1), f32(2.0**103), np.inf),
        (f32(np.inf), f32(0), f32(1), np.nan),
    ]
    a, b, c, expected = (np.array(column, f32) for column in zip(*cases, strict=True))
    same_bits(fma32(a, b, c), expected)
    assert fma32(np.ones((4, 1, 3), f32), np.ones((2, 1), f32), f32(1)).shape == (4, 2, 3)
    assert fma32(np.zeros((0, 3), f32), f32(1), f32(1)).shape == (0, 3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_blocks=st.integers(1, 3),
    exponent=st.integers(-140, 120),
    special=st.none() | st.floats(width=32),
)
def test_quantize_activations(seed, n_blocks, exponent, special):
    """Expectation: the scalar transcription, and |x - q s| <= s (1/2 + 2^-15) (stated rounding)."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = np.ldexp(rng.standard_normal((1, 32 * n_blocks)), exponent).astype(f32)
    if special is not None:
        x[0, rng.integers(32)] = special
    q, s = quantize_activations(x)
    for b in range(n_blocks):
        block = x[0, 32 * b : 32 * b + 32]
        expected_q, expected_s = scalar.quantize_block(block)
        assert q[0, 32 * b : 32 * b + 32].tolist() == expected_q
        same_bits(s[0, b], expected_s)
        if s[0, b] > 0:
            error = np.abs(np.float64(block) - np.array(expected_q) * np.float64(expected_s))
            assert error.max() <= float(expected_s) * (0.5 + 2.0**-15)


def test_activations_of_1e6_nan_and_inf():
    """C18a: 1e6 stays finite; contract 1: NaN and infinity are seen, tiny blocks are zero."""
    x = np.zeros((1, 32 * 5), f32)
    x[0, 3], x[0, 40], x[0, 70], x[0, 100] = 1e6, np.nan, -np.inf, 2.0**-101
    x[0, 130] = np.finfo(f32).max
    q, s = quantize_activations(x)
    assert s[0, 0] == f32(1e6) / f32(127) and q[0, 3] == 127
    assert np.isnan(s[0, 1]) and np.isnan(s[0, 2]) and not q[0, 32:96].any()
    assert s[0, 3] == 0 and not q[0, 96:128].any()
    assert np.isfinite(s[0, 4]) and q[0, 130] == 127


def test_group_sums():
    """Expectation: sums by hand; no wrap at the largest codes."""
    q = np.full((2, 64), 127, np.int8)
    q[1, 16:] = -127
    assert group_sums(q, 16).tolist() == [[2032] * 4, [2032] + [-2032] * 3]
    assert group_sums(q, 32).tolist() == [[4064] * 2, [0, -4064]]


def exp_arguments():
    rng = np.random.default_rng(1)
    special = [0.0, -0.0, 88, 88.5, -87, -87.5, 1e30, -1e30, np.inf, -np.inf, np.nan, 1e-40]
    return np.concatenate((special, rng.uniform(-90, 90, 3000), rng.normal(0, 1, 1000))).astype(f32)


def test_exp_equals_scalar_transcription():
    """Expectation: contract 5 with fmaf, one number at a time."""
    x = exp_arguments()
    same_bits(exp_c(x), [scalar.exp_c(v) for v in x])


def test_exp_is_exp():
    """Expectation: math.exp; the stated relative error is 2^-22."""
    x = exp_arguments()
    x = x[(x >= -87) & (x <= 88)]
    expected = np.array([math.exp(v) for v in x])
    assert np.abs(exp_c(x) / expected - 1).max() <= 2.0**-22


def test_silu_and_swiglu_equal_scalar_transcription():
    """Expectation: contract 5, one number at a time; NaN stays NaN."""
    g = exp_arguments()[4:]
    u = np.roll(g, 7)
    with np.errstate(all="ignore"):
        same_bits(silu_c(g), [scalar.silu(v) for v in g])
        finite = np.isfinite(g) & np.isfinite(u)
        pairs = list(zip(g[finite], u[finite], strict=True))
    same_bits(swiglu_oai_c(g[finite], u[finite], 7.0), [scalar.swiglu_oai(*p, 7.0) for p in pairs])
    nan, one = np.array([np.nan, 1], f32), np.array([1, np.nan], f32)
    assert np.isnan(swiglu_oai_c(nan, one, 7.0)).all()
