"""embed: rows against the gguf package's decoder and torch's own casts, through a file mapping."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from strata.kernels.embed import lookup
from strata.kernels.weight import Weight

ROWS, COLS = 40, 64


def table() -> np.ndarray:
    return np.random.default_rng(4).standard_normal((ROWS, COLS)).astype(np.float32)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "BF16", "F16", "F32"])
def test_rows_equal_the_gguf_package_bit_for_bit(name: str) -> None:
    """Against gguf.quants on the same bytes; ids may repeat and have any shape."""
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(table(), kind)
    data = torch.from_numpy(raw.view(np.uint8).reshape(ROWS, -1).copy())
    ids = torch.tensor([[3, 0, 39], [3, 3, 17]])
    got = lookup(Weight(name, ROWS, COLS, data), ids)
    expected = gguf.quants.dequantize(raw, kind).reshape(ROWS, COLS)[ids.numpy()]
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), expected)


def test_a_read_only_mapping_is_enough(tmp_path: Path) -> None:
    """Against the array that was written; the mapping is opened without write access."""
    path = tmp_path / "table.bin"
    table().tofile(path)
    mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(ROWS, 4 * COLS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch wants arrays that can be written
        data = torch.from_numpy(mapped)
    got = lookup(Weight("F32", ROWS, COLS, data), torch.tensor([5, 1]), torch.float64)
    assert got.dtype == torch.float64 and np.array_equal(got.numpy(), table()[[5, 1]])


def test_the_tensor_scale_multiplies_the_rows() -> None:
    """By hand: a scale of 0.5 halves every number."""
    data = torch.from_numpy(table()).view(torch.uint8).view(ROWS, 4 * COLS)
    ids = torch.arange(ROWS)
    half = lookup(Weight("F32", ROWS, COLS, data, scale=0.5), ids)
    assert np.array_equal(half.numpy(), table() * np.float32(0.5))


def test_an_id_outside_the_table_is_an_error() -> None:
    """torch's own range check: nothing outside the table is ever read."""
    data = torch.zeros(ROWS, 4 * COLS, dtype=torch.uint8)
    with pytest.raises(IndexError):
        lookup(Weight("F32", ROWS, COLS, data), torch.tensor([ROWS]))
