"""The native re-coder against the NumPy codec (``formats.tiles``), byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.tiles import encode, tile_plan
from strata.formats.weight_types import TYPES
from strata.native import available_isas
from strata.native.recode import encode_into

QUANTIZED = sorted(t.name for t in TYPES.values() if t.kind == "quantized")


def recoded(name, raw, n, isa="auto"):
    """Tiles in memory that was full of ones."""
    out = np.full(tile_plan(name, len(raw), n).n_bytes, 0xFF, np.uint8)
    encode_into(name, raw, out, isa)
    return out


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_type_on_every_instruction_set(name, isa):
    """Expectation: formats.tiles.encode of 300 blocks of random bytes and more."""
    n = 768 if TYPES[name].block_weights == 256 else 320
    raw = np.random.default_rng(5).integers(0, 256, (101, TYPES[name].row_bytes(n)), np.uint8)
    np.testing.assert_array_equal(recoded(name, raw, n, isa), encode(name, raw))


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(QUANTIZED),
    rows=st.integers(0, 50),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes(name, rows, blocks, seed):
    """Expectation: formats.tiles.encode; NVFP4 and MXFP4 scale bytes of every kind included."""
    n = blocks * TYPES[name].block_weights
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, TYPES[name].row_bytes(n)), np.uint8)
    np.testing.assert_array_equal(recoded(name, raw, n), encode(name, raw))


def test_strided_rows():
    """Expectation: the same rows, copied."""
    raw = np.random.default_rng(6).integers(0, 256, (40, 36), np.uint8)[::2, :18]
    np.testing.assert_array_equal(recoded("Q4_0", raw, 32), encode("Q4_0", raw.copy()))


def test_refusals():
    """Sizes that do not fit are never handed to native code."""
    raw = np.zeros((16, 18), np.uint8)
    for wrong in (np.zeros(383, np.uint8), np.zeros(384, np.int8), np.zeros(768, np.uint8)[::2]):
        with pytest.raises(FormatError, match=r"Q4_0 matrix \[16, 32\].*\[384\]"):
            encode_into("Q4_0", raw, wrong)
    with pytest.raises(UnsupportedError, match="F16 has no tiles"):
        encode_into("F16", raw, np.zeros(384, np.uint8))
    with pytest.raises(FormatError, match="Q4_0"):
        encode_into("Q4_0", raw[:, :17], np.zeros(384, np.uint8))
