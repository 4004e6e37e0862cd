"""Table rows on the device against kernels/embed, for every type that has tiles and the floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.formats.tile_formats import tile_format
from strata.formats.weight_types import TYPES
from strata.kernels.embed import lookup as lookup_ref
from strata.kernels.embed.triton import lookup
from strata.kernels.gpu_weight import to_gpu
from strata.kernels.weight import Weight

# random scales are now and then NaN or infinite, of which NumPy warns in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TILED = [name for name in TYPES if tile_format(name) is not None]
ROWS, COLS = 35, 512
IDS = [0, 17, 34, 17]


def random_table(name: str, scale: float = 1.0) -> Weight:
    """Random bytes; every one is a valid block of its type (scales may be NaN or infinite)."""
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (ROWS, TYPES[name].row_bytes(COLS)), dtype=np.uint8)
    return Weight(name, ROWS, COLS, torch.from_numpy(raw), scale)


@pytest.mark.parametrize("name", [*TILED, "F32", "F16", "BF16"])
def test_rows(triton_device: torch.device, name: str) -> None:
    """Same bits as the NumPy decoder; NaN where it has NaN."""
    table = random_table(name)
    ids = torch.tensor(IDS)
    expected = lookup_ref(table, ids)
    out = torch.full((len(IDS), COLS), 7.0, device=triton_device)
    lookup(to_gpu(table, triton_device), ids.int().to(triton_device), out)
    found = out.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_every_stream_and_the_tensor_scale(triton_device: torch.device, name: str) -> None:
    table = random_table(name, scale=0.3)
    ids = torch.tensor(IDS)
    expected = lookup_ref(table, ids).nan_to_num(nan=0.0)
    out = torch.full((len(IDS), 3, COLS), 7.0, device=triton_device)
    lookup(to_gpu(table, triton_device), ids.to(triton_device), out)
    for c in range(3):
        assert torch.equal(out[:, c].cpu().nan_to_num(nan=0.0), expected)
