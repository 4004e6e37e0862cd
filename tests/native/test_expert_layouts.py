"""Whole experts in every layout, on every instruction set: odd shapes, and numbers that break.

Expectation everywhere: ``expert_rows_contract`` of the file's own rows (docs/decisions/001), which
shares no code with the kernels and knows no tiles.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.formats.tiles import tile_format
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import layout
from tests.kernels.test_linear import same_bits
from tests.native.kit import ISAS, Batch, make_batch, pool
from tests.native.test_tiles import tiled_batch

WEIGHTS = sorted(t.name for t in TYPES.values() if t.kind == "quantized") + ["F32", "F16", "BF16"]
HOW = ("native", "tiles")
TILES = ("tiles",) * 3


def width(wanted: int, kinds: tuple[str, ...]) -> int:
    """The least width of whole blocks of all kinds that is not below the one wanted; that itself
    where they are floats."""
    block = max(TYPES[kind].block_weights for kind in kinds)
    return -(-wanted // block) * block


def layouts_of(types: tuple[str, str, str], wanted: tuple[str, str, str]) -> tuple[str, ...]:
    """The layouts wanted, native where a type has no tiles."""
    return tuple(
        how if tile_format(kind) is not None else "native"
        for kind, how in zip(types, wanted, strict=True)
    )


def apart(batch: Batch) -> Batch:
    """The same experts with their matrices and extras in four memories, as files hold them."""
    shape = batch.shape
    starts = [shape.gate_offset, shape.up_offset, shape.down_offset]
    extras = [o for o in (shape.gate_bias_offset, shape.scale_offset) if o >= 0]
    starts.append(min(extras, default=shape.blob_bytes))
    sizes = [*shape.matrix_bytes, shape.blob_bytes - starts[3]]
    kept, bases = [], []
    for blob in batch.blobs:
        # two bytes off: a file's matrices begin anywhere
        pieces = [
            torch.empty(size + 2, dtype=torch.uint8)[2:].copy_(blob[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]
        kept += pieces
        bases.append([p.data_ptr() - s for p, s in zip(pieces, starts, strict=True)])
    address = np.array(bases, np.int64)[batch.expert]
    blobs = [*batch.blobs, *kept]
    return Batch(shape, blobs, batch.expert, address, batch.start, batch.row, batch.token,
                 batch.x_TD)  # fmt: skip


three_types = st.tuples(*[st.sampled_from(WEIGHTS)] * 3)
three_layouts = st.tuples(*[st.sampled_from(HOW)] * 3)


@settings(max_examples=60, deadline=None)
@given(
    types=three_types,
    hows=three_layouts,
    d=st.integers(1, 300),
    f=st.integers(1, 300),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    extras=st.tuples(st.booleans(), st.booleans(), st.sampled_from(["silu", "swiglu_oai"])),
    isa=st.sampled_from(ISAS),
    workers=st.sampled_from([1, 2, 3, 7]),
    seed=st.integers(0, 2**16),
)
# rows that are no multiple of 16 on either side; down rows of 640 and of 32
@example(("Q4_K", "IQ3_S", "F32"), TILES, 256, 37, (2, 3), (False, False, "silu"), ISAS[-1], 2, 1)
@example(("F16", "BF16", "Q8_0"), TILES, 45, 32, (2, 3), (True, False, "silu"), ISAS[-1], 3, 2)
@example(
    ("IQ3_S", "IQ3_S", "IQ4_NL"),
    TILES,
    256,
    640,
    (1, 4),
    (False, False, "silu"),
    ISAS[-1],
    2,
    3,
)
@example(("Q2_0", "Q2_0", "Q2_0"), TILES, 64, 640, (1, 1), (False, False, "silu"), ISAS[-1], 1, 4)
@example(
    ("Q5_1", "MXFP4", "Q4_1"),
    TILES,
    32,
    32,
    (4, 9),
    (True, True, "swiglu_oai"),
    ISAS[0],
    7,
    5,
)
def test_odd_experts_in_any_layout(
    types, hows, d, f, sizes, extras, isa, workers, seed
) -> None:  # fmt: skip
    d, f = width(d, types[:2]), width(f, types[2:])
    bias, scales, activation = extras
    shape = layout(d, f, types, bias=bias, scales=scales, activation=activation)
    n_experts, n_tokens = sizes
    batch = make_batch(shape, n_experts, n_tokens, min(3, n_experts), seed)
    expected = batch.expected()
    same_bits(apart(batch).run(pool(isa, workers)), expected)
    mixed = tiled_batch(batch, layouts_of(types, hows))
    same_bits(mixed.run(pool(isa, workers)), expected)


KINDS = {
    "q8": ("Q8_0", "Q8_0", "Q8_0"),
    "with minimums": ("Q4_K", "Q4_1", "Q5_1"),
    "published": ("IQ3_S", "IQ3_XXS", "IQ4_NL"),
    "two bits": ("IQ2_S", "Q2_0", "Q2_0"),
    "fp4": ("MXFP4", "NVFP4", "MXFP4"),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("how", [*HOW, "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_c18a_overflow_and_nan(kind: str, how: str, isa: str) -> None:
    """1e6 gives finite rows; a NaN or an infinity fills its own rows, leaves the others' bits, and
    nothing behind: the next batch is right."""
    batch = make_batch(layout(256, 64, KINDS[kind], scales="NVFP4" in KINDS[kind]), 4, 5, 2)
    if how == "tiles":
        batch = tiled_batch(batch, TILES)
    elif how == "apart":
        batch = apart(batch)
    clean = batch.expected() if how != "apart" else batch.run(pool("portable", 1))
    x = batch.x_TD
    x[0, 3] = 1e6
    huge = batch.run(pool(isa))
    assert torch.isfinite(huge).all()
    same_bits(huge[2:], clean[2:])
    assert not torch.equal(huge[:2], clean[:2])
    x[0] = batch.x_TD[1]
    before = batch.run(pool(isa))
    for broken in (float("nan"), float("inf"), -float("inf")):
        x[2, 100] = broken
        rows = batch.run(pool(isa))
        assert torch.isnan(rows[4:6]).all()
        same_bits(rows[[0, 1, 2, 3, 6, 7, 8, 9]], before[[0, 1, 2, 3, 6, 7, 8, 9]])
    x[2] = batch.x_TD[1]
    after = batch.run(pool(isa))
    same_bits(after[[0, 1, 2, 3, 6, 7, 8, 9]], before[[0, 1, 2, 3, 6, 7, 8, 9]])
    assert torch.isfinite(after).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("how", [*HOW, "apart"])
def test_c16_widths_that_workers_do_not_divide(how: str, workers: int, isa: str) -> None:
    """352 gate rows in tiles of 16 are 22 tiles: not 3's nor 7's; 96 down rows are 6."""
    batch = make_batch(layout(96, 352, ("Q4_0", "IQ4_NL", "Q8_0")), 6, 4, 3, seed=workers)
    expected = batch.expected()
    moved = {
        "native": lambda: batch,
        "tiles": lambda: tiled_batch(batch, TILES),
        "apart": lambda: apart(batch),
    }[how]()
    same_bits(moved.run(pool(isa, workers)), expected)
