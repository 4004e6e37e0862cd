"""Memory that is read: ordinary weights, one matrix in many places, sizes from the caches."""

from __future__ import annotations

import numpy as np
import pytest

from strata.bench import cpu_memory
from strata.bench.cpu_memory import (
    CACHES,
    LEAST_BYTES,
    MIB,
    Arena,
    arena_bytes,
    chunk_rows,
    random_rows,
)
from strata.core.errors import SettingError
from strata.formats.quants import dequantize
from strata.formats.tile_formats import tile_format
from strata.formats.weight_types import TYPES

MEASURED = [
    t.name for t in TYPES.values() if t.kind == "quantized" or t.name in ("F32", "F16", "BF16")
]


@pytest.mark.parametrize("name", MEASURED)
def test_weights_are_ordinary_numbers(name: str) -> None:
    """Finite, of both sides of zero, of many values, neither huge nor near denormal numbers."""
    raw = random_rows(name, 8, 512, np.random.default_rng(0))
    assert raw.dtype == np.uint8 and raw.shape == (8, TYPES[name].row_bytes(512))
    w = dequantize(TYPES[name], raw)
    assert np.isfinite(w).all()
    assert 1e-4 < np.abs(w).mean() < 100 and (w < 0).any() and (w > 0).any()
    small = np.abs(w[w != 0])
    assert small.min() > 1e-12
    # as many codes as the type has bits for, over blocks of different scales
    assert len(np.unique(w)) > 30


def test_floats_that_have_no_rows_here_are_refused() -> None:
    with pytest.raises(SettingError, match="--types F8_E4M3: this type is not measured"):
        random_rows("F8_E4M3", 1, 32, np.random.default_rng(0))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ3_S", "Q2_0", "F16"])
def test_an_arena_holds_the_same_matrix_in_places_of_its_own(name: str) -> None:
    """Expectation: the rows given, decoded; addresses a matrix apart, tiles on 128 bytes."""
    raw = random_rows(name, 48, 512, np.random.default_rng(1))
    expected = dequantize(TYPES[name], raw)
    arena = Arena(MIB)
    for layout in ("native", "tiles"):
        if layout == "tiles" and tile_format(name) is None:
            continue
        chunks = arena.fill(name, layout, raw, 512)
        n = MIB // chunks.n_bytes
        assert len(chunks.matrices) == n > 2
        for w in (*chunks.matrices[:2], chunks.matrices[-1]):
            assert w.layout == layout and tuple(w.data.shape) == w.data_shape()
            np.testing.assert_array_equal(w.dequantize(slice(None)), expected)
        places = [w.data.data_ptr() for w in chunks.matrices]
        assert np.diff(places).tolist() == [chunks.n_bytes] * (n - 1)
        assert layout == "native" or all(place % 128 == 0 for place in places)


def test_size_of_an_arena() -> None:
    """Several caches, at least 64 MiB; four times as much must be free."""
    assert arena_bytes(300 * MIB, 100 << 30) == int(CACHES * 300 * MIB)
    assert arena_bytes(0, 1 << 30) == LEAST_BYTES
    assert CACHES > 4
    with pytest.raises(SettingError, match=r"300 MiB of cache takes three areas of 1350 MiB, and"):
        arena_bytes(300 * MIB, 4 << 30)


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q2_0"])
def test_a_chunk_is_whole_tiles_and_a_quarter_arena_at_most(name: str, workers: int) -> None:
    """Expectation: about 4 MiB for each worker."""
    arena = 144 * MIB
    rows = chunk_rows(name, 2560, workers, arena)
    n_bytes = rows * TYPES[name].row_bytes(2560)
    assert rows % 16 == 0 and rows > 0
    wanted = min(4 * MIB * workers, arena // 4)
    assert wanted - 16 * TYPES[name].row_bytes(2560) <= n_bytes <= wanted
    assert cpu_memory.CHUNK_BYTES == 4 * MIB
