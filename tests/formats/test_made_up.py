"""Made-up weights are valid: our decoder (equal to ggml's, tested elsewhere) gives finite numbers
of the size asked for, for every type that can be made."""

from __future__ import annotations

import numpy as np
import pytest

from strata.core.errors import InputError
from strata.formats.made_up import SCALE_AT, MadeUpCheckpoint, random_blocks
from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES


@pytest.mark.parametrize("kind", [*SCALE_AT, "MXFP4", "BF16", "F16", "F32"])
def test_blocks_have_the_size_asked_for(kind: str) -> None:
    """Root mean square within 10 % (MXFP4 has only powers of two: a factor of 1.5), mean near 0."""
    blocks = random_blocks(kind, 2048, 0.02)
    values = dequantize(TYPES[kind], blocks).astype(np.float64)
    assert np.isfinite(values).all()
    rms = np.sqrt((values**2).mean())
    assert 0.02 / 1.5 < rms < 0.02 * 1.5 if kind == "MXFP4" else abs(rms - 0.02) < 0.002
    assert abs(values.mean()) < 0.002


@pytest.mark.parametrize("kind", ["IQ2_S", "Q4_K", "BF16", "MXFP4"])
def test_a_longer_pool_begins_like_a_shorter_one(kind: str) -> None:
    """So a tensor's bytes do not depend on which tensors were read before it."""
    short, long = random_blocks(kind, 600, 0.02), random_blocks(kind, 900, 0.02)
    assert np.array_equal(long[:600], short)


def test_what_cannot_be_made_up_is_named() -> None:
    with pytest.raises(InputError, match=r"NVFP4 cannot be made up; known: .*Q4_K"):
        random_blocks("NVFP4", 1, 0.02)


def test_rows_are_views_and_tensors_differ() -> None:
    """Rows equal the flat bytes, come again the same, and differ between tensors, rows and
    seeds."""
    table = [("a", "Q4_K", (8, 512)), ("b", "Q4_K", (8, 512)), ("n", "F32", (16,))]

    def made(seed: int) -> MadeUpCheckpoint:
        return MadeUpCheckpoint("made", table, {}, lambda name, shape: np.ones(shape), seed)

    first, again, other = made(0), made(0), made(1)
    rows = first.rows("a")
    assert rows.shape == (8, 2 * 144) and not rows.flags.writeable
    assert np.array_equal(first.raw("a").reshape(rows.shape), rows)
    assert np.array_equal(rows, again.rows("a"))
    assert not np.array_equal(rows, first.rows("b"))
    assert not np.array_equal(rows, other.rows("a"))
    assert not np.array_equal(rows[0], rows[1])
    assert (first.float32("n") == 1).all()
    first.close()
    with pytest.raises(InputError, match="closed"):
        first.rows("a")
