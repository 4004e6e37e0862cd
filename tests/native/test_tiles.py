"""Kernels that read tiles: the bits of the file's own rows and of the contract, whatever the type,
instruction set, row count, shape, layout and number of workers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strata
from strata.core.errors import EngineError, UnsupportedError
from strata.formats.tiles import encode, tile_format, tile_plan
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import layout
from strata.kernels.expert_rows.shape import ExpertShape, relayout
from strata.kernels.linear import linear_contract
from strata.kernels.weight import Weight
from strata.native.extension import _native
from tests.kernels.test_linear import make_weight, n_cols_of, same_bits
from tests.native.kit import ISAS, Batch, make_batch, pool
from tests.native.test_rows import activations, product

QUANTIZED = sorted(t.name for t in TYPES.values() if t.kind == "quantized")
FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "q8_0.gguf"


def tiled(w: Weight) -> Weight:
    """The same matrix in tiles."""
    data = torch.from_numpy(encode(w.type, w.data.numpy()))
    return Weight(w.type, w.n_rows, w.n_cols, data, w.scale, "tiles")


def tiled_blob(shape: ExpertShape, to: ExpertShape, blob: torch.Tensor) -> torch.Tensor:
    """An expert's blob with its matrices in other layouts, 64-byte aligned."""
    memory = torch.zeros(to.blob_bytes + 128, dtype=torch.uint8)
    skip = -memory.data_ptr() % 128
    out, old = memory[skip : skip + to.blob_bytes], blob.numpy()
    d, f = shape.d_model, shape.d_expert
    pieces = (("gate", f, d), ("up", f, d), ("down", d, f))
    for (piece, n_rows, _), size in zip(pieces, shape.matrix_bytes, strict=True):
        start = getattr(shape, f"{piece}_offset")
        raw = old[start : start + size]
        if getattr(to, f"{piece}_layout") == "tiles":
            raw = encode(getattr(shape, f"{piece}_type"), raw.reshape(n_rows, -1))
        to_start = getattr(to, f"{piece}_offset")
        out[to_start : to_start + len(raw)] = torch.from_numpy(raw)
    lengths = {"gate_bias": 4 * f, "up_bias": 4 * f, "down_bias": 4 * d, "scale": 12}
    for piece, n_bytes in lengths.items():
        start, to_start = (getattr(s, f"{piece}_offset") for s in (shape, to))
        if start >= 0:
            out[to_start : to_start + n_bytes] = blob[start : start + n_bytes]
    return out


def tiled_batch(batch: Batch, layouts: tuple[str, str, str]) -> Batch:
    """The same experts in other layouts."""
    to = relayout(batch.shape, layouts)  # type: ignore[arg-type]
    blobs = [tiled_blob(batch.shape, to, blob) for blob in batch.blobs]
    address = np.array([blobs[e].data_ptr() for e in batch.expert], np.int64)
    return Batch(to, blobs, batch.expert, address, batch.start, batch.row, batch.token, batch.x_TD)


@pytest.mark.parametrize("name", QUANTIZED)
def test_planes_lie_where_the_format_says(name: str) -> None:
    """Expectation: formats.tile_formats.tile_plan."""
    for n_rows in (1, 16, 37):
        for n_blocks in (1, 13, 80):
            n_cols = n_cols_of(name, n_blocks)
            plan = tile_plan(name, n_rows, n_cols)
            expected = [plan.codes, plan.scales, plan.minimums, plan.supers, plan.n_bytes]
            assert _native.tile_offsets(name, n_rows, n_cols) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_for_1_to_16_rows(name: str, isa: str) -> None:
    """Expectation: linear_contract of the file's rows; 19 weight rows, 13 blocks or so."""
    n_cols = n_cols_of(name, 13)
    w = make_weight(name, 19, n_cols, np.random.default_rng(1), 0.7 if name == "NVFP4" else 1.0)
    x = activations(16, n_cols, 2)
    expected, tiles = linear_contract(x, w), tiled(w)
    for n_tokens in range(1, 17):
        same_bits(product(tiles, x[:n_tokens], isa), expected[:n_tokens])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_for_many_rows(name: str, isa: str) -> None:
    """All counts up to 33 activation rows: passes of every size over pairs of tile rows and over a
    last one alone (three tile rows, 37 weight rows; 17 blocks or so: segments of unequal length).
    Expectation: linear_contract of the file's rows."""
    n_cols = n_cols_of(name, 17)
    w = make_weight(name, 37, n_cols, np.random.default_rng(11), 0.7 if name == "NVFP4" else 1.0)
    x = activations(33, n_cols, 12)
    expected, tiles = linear_contract(x, w), tiled(w)
    for n_tokens in range(5, 34):
        same_bits(product(tiles, x[-n_tokens:], isa), expected[-n_tokens:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_for_published_widths(name: str, isa: str) -> None:
    """Expectation: the kernels for the file's rows (tested against the contract) at 32, 64, 640
    and 2560 columns, and the contract on the tiles themselves at the smallest."""
    block = TYPES[name].block_weights
    widths = sorted({-(-k // block) * block for k in (32, 64, 640, 2560)})
    for n_cols in widths:
        w = make_weight(name, 45, n_cols, np.random.default_rng(n_cols))
        x, tiles = activations(5, n_cols, 3), tiled(w)
        same_bits(product(tiles, x, isa, 2), product(w, x, isa, 2))
        if n_cols == widths[0]:
            same_bits(product(tiles, x, isa), linear_contract(x, tiles))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(QUANTIZED),
    isa=st.sampled_from(ISAS),
    workers=st.sampled_from([1, 2, 3, 7]),
    n_blocks=st.integers(1, 40),
    n_rows=st.integers(1, 150),
    n_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_bits_for_odd_shapes(name, isa, workers, n_blocks, n_rows, n_tokens, seed) -> None:
    """Expectation: linear_contract, whatever the shape and the number of workers."""
    n_cols = n_cols_of(name, n_blocks)
    w = make_weight(name, n_rows, n_cols, np.random.default_rng(seed))
    x = activations(n_tokens, n_cols, seed)
    same_bits(product(tiled(w), x, isa, workers), linear_contract(x, w))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_wild_weights_keep_the_bits(name: str, isa: str) -> None:
    """Expectation: linear_contract on any bytes: scales NaN, infinite, subnormal or -0; codes at
    their ends (Q8_0's -128 among them)."""
    rng, t = np.random.default_rng(8), TYPES[name]
    n_cols = n_cols_of(name, 3)
    raw = torch.from_numpy(rng.integers(0, 256, (40, t.row_bytes(n_cols)), np.uint8))
    w = Weight(name, 40, n_cols, raw)
    x = activations(5, n_cols, 9)
    same_bits(product(tiled(w), x, isa), linear_contract(x, w))


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_codes_are_exact(isa: str) -> None:
    """All codes -128 or 127 against activations of +-127: no sum saturates. Expectation:
    linear_contract."""
    rng = np.random.default_rng(2)
    for name in ("Q8_0", "Q6_K", "Q5_1", "Q4_0", "IQ4_NL", "IQ3_XXS", "IQ3_S", "IQ2_S", "Q2_K"):
        n_cols = n_cols_of(name, 8)
        w = make_weight(name, 32, n_cols, rng)
        for fill in (0x80, 0x7F, 0x00, 0xFF):
            raw = w.data.clone()
            raw[:, 2:] = torch.where(torch.rand(raw[:, 2:].shape) < 0.95, fill, raw[:, 2:])
            extreme = Weight(name, 32, n_cols, raw)
            for sign in (1.0, -1.0):
                x = torch.full((4, n_cols), sign)
                same_bits(product(tiled(extreme), x, isa), linear_contract(x, extreme))


Q4 = ("Q4_K", "Q4_K", "Q6_K")
MIXTURES = {
    "all": (layout(512, 256, Q4), ("tiles",) * 3),
    "gate": (layout(96, 64, ("Q8_0",) * 3), ("tiles", "native", "native")),
    "down": (layout(512, 640, ("IQ3_XXS", "IQ3_XXS", "IQ4_NL")), ("native", "native", "tiles")),
    "float_down": (layout(64, 50, ("Q5_0", "Q5_1", "F32")), ("tiles", "tiles", "native")),
    "biases": (
        layout(64, 32, ("MXFP4",) * 3, bias=True, activation="swiglu_oai"),
        ("tiles",) * 3,
    ),
    "scales": (layout(128, 192, ("NVFP4",) * 3, scales=True), ("tiles", "tiles", "native")),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_mixed_layouts(name: str, isa: str) -> None:
    """Expectation: expert_rows_contract of the file's layout and of the mixture itself."""
    shape, layouts = MIXTURES[name]
    batch = make_batch(shape, n_experts=5, n_tokens=6, per_token=3)
    expected, tiles = batch.expected(), tiled_batch(batch, layouts)
    same_bits(tiles.run(pool(isa)), expected)
    same_bits(tiles.expected(), expected)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_worker_count_gives_the_same_bits(workers: int) -> None:
    """Widths of 96 and 352 rows, which 7 does not divide. Expectation: expert_rows_contract."""
    shape = layout(96, 352, ("Q4_0", "Q4_1", "Q8_0"))
    batch = make_batch(shape, n_experts=9, n_tokens=4, per_token=4, seed=workers)
    expected, tiles = batch.expected(), tiled_batch(batch, ("tiles",) * 3)
    for _ in range(5):
        same_bits(tiles.run(pool("auto", workers)), expected)


def test_refusals() -> None:
    """Expectation: one clear line for a type without tiles and for data of another size."""
    w = tiled(make_weight("Q4_0", 5, 64, np.random.default_rng(0)))
    with pytest.raises(EngineError, match="linear: weight"):
        pool().linear(Weight("Q4_0", 17, 64, w.data, 1.0, "tiles"), torch.zeros(2, 64))
    assert tile_format("F16") is None
    with pytest.raises(UnsupportedError, match="F16 has no tiles"):
        pool().linear(Weight("F16", 5, 64, w.data, 1.0, "tiles"), torch.zeros(2, 64))


def test_logits_of_a_model_in_tiles() -> None:
    """A whole model, as one prompt and in windows. Expectation: its logits with native experts."""
    tokens = np.random.default_rng(4).integers(8, 64, 40).tolist()
    logits = []
    for how in ("native", "tiles"):
        with strata.load(FIXTURE, device="cpu", context=128, expert_layout=how) as model:
            layers = model.engine.service.tier._store.layers
            assert {kind for layer in layers for kind in layer.shape.layouts} == {how}
            logits.append(model.logits(tokens))
            logits.append(model.logits(tokens, through="windows", window=4))
    assert all(np.array_equal(other, logits[0]) for other in logits[1:])
