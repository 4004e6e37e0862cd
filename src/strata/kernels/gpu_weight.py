"""A dense weight matrix on the GPU: quantized types as tiles, float types as rows.

Knows no kernels. Quantized codes and scales are the same numbers as on the CPU
(docs/decisions/003-tiles.md); float types other than BF16, F16 and F32 are widened exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from strata.core.errors import UnsupportedError
from strata.formats.tiles import tile_format, tile_plan
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight
from strata.native.recode import encode_into

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""Weight type of each element type that float rows may have."""


@dataclass(frozen=True)
class GpuWeight:
    """Matrix [n_rows, n_cols].

    type: the weight type of the file. data: uint8 [n_bytes] of tiles when ``is_tiles``, otherwise
    rows [n_rows, n_cols] in bfloat16, float16 or float32; contiguous, on a multiple of 128 bytes.
    scale: multiplies every output once, after the row sum.
    """

    type: str
    n_rows: int
    n_cols: int
    data: torch.Tensor
    scale: float = 1.0

    @property
    def is_tiles(self) -> bool:
        """Whether data holds tiles."""
        return self.data.dtype == torch.uint8

    @property
    def n_bytes(self) -> int:
        """Bytes on the device."""
        return self.data.numel() * self.data.element_size()


def to_gpu(weight: Weight, device: torch.device | str) -> GpuWeight:
    """Copy a weight to the device; quantized rows become tiles, F8 and F64 are widened to F32.

    UnsupportedError for integer types.
    """
    kind = TYPES[weight.type].kind
    if kind == "integer":
        raise UnsupportedError(
            f"a matrix of type {weight.type} holds no weights; use a float or quantized checkpoint"
        )
    if weight.layout == "tiles":
        data = weight.data
    elif tile_format(weight.type) is not None:
        size = tile_plan(weight.type, weight.n_rows, weight.n_cols).n_bytes
        data = torch.empty(size, dtype=torch.uint8)
        encode_into(weight.type, weight.data.numpy(), data.numpy())
    elif weight.type in _DTYPES:
        data = weight.data.view(_DTYPES[weight.type])
    else:
        data = torch.from_numpy(np.ascontiguousarray(weight.dequantize(slice(0, weight.n_rows))))
    # a copy of its own even on the CPU: a file mapping may begin anywhere
    data = torch.empty(data.shape, dtype=data.dtype, device=device).copy_(data)
    return GpuWeight(weight.type, weight.n_rows, weight.n_cols, data, weight.scale)


def gpu_bytes(weight_type: str, n_rows: int, n_cols: int) -> int:
    """Device bytes of a matrix of that type before it is made."""
    if tile_format(weight_type) is not None:
        return tile_plan(weight_type, n_rows, n_cols).n_bytes
    width = _DTYPES[weight_type].itemsize if weight_type in _DTYPES else 4
    return n_rows * n_cols * width
