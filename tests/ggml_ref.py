"""ggml's own quantizers and dequantizers (package ``libggml-python``) through ctypes, as reference.

Row quantization is ``ggml_quantize_chunk``; dequantization the exported ``dequantize_row_<type>``
functions of the generic C code (no CPU-specific kernels, so one fixed arithmetic).
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.formats.weight_types import TYPES, WeightType

# ggml refuses (aborts the process) to quantize these without an importance vector
_NEEDS_IMPORTANCE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"}


@cache
def library() -> ctypes.CDLL:
    """The ggml base library inside the installed package."""
    spec = find_spec("libggml")
    assert spec is not None and spec.submodule_search_locations, "install libggml-python"
    folder = Path(next(iter(spec.submodule_search_locations)))
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")
    found = [p for name in names for p in sorted(folder.rglob(name))]
    assert found, f"no ggml base library under {folder}"
    lib = ctypes.CDLL(str(found[0]))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return lib


def quantize(name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[rows, n] f32 -> uint8 [rows, row_bytes], with ggml's own search for scales."""
    weight_type = TYPES[name]
    x = np.ascontiguousarray(x, np.float32)
    rows, n = x.shape
    out = np.zeros((rows, weight_type.row_bytes(n)), np.uint8)
    importance = np.ones(n, np.float32) if name in _NEEDS_IMPORTANCE else None
    n_bytes = library().ggml_quantize_chunk(
        weight_type.ggml_id,
        x.ctypes.data,
        out.ctypes.data,
        0,
        rows,
        n,
        None if importance is None else importance.ctypes.data,
    )
    assert n_bytes == out.size, (name, n_bytes, out.size)
    return out


def dequantize(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[rows, row_bytes] uint8 -> f32 [rows, n]."""
    weight_type = TYPES[name]
    raw = np.ascontiguousarray(raw)
    rows, row_bytes = raw.shape
    n = row_bytes // weight_type.block_bytes * weight_type.block_weights
    function: Any = getattr(library(), "dequantize_row_" + name.lower().replace("_k", "_K"))
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    out = np.empty((rows, n), np.float32)
    function(raw.ctypes.data, out.ctypes.data, raw.size // weight_type.block_bytes
             * weight_type.block_weights)  # fmt: skip
    return out


def random_raw(
    weight_type: WeightType, rows: int, n: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Random bytes [rows, row_bytes] of a quantized type; every f16 scale inside is finite."""
    n_blocks = rows * (n // weight_type.block_weights)
    raw = rng.integers(0, 256, (n_blocks, weight_type.block_bytes), np.uint8)
    for offset in _F16_OFFSETS[weight_type.name]:
        scale = rng.normal(0, 0.05, (n_blocks, 1)).astype(np.float16)
        raw[:, offset : offset + 2] = scale.view(np.uint8)
    if weight_type.name == "MXFP4":
        raw[:, 0] = rng.integers(100, 140, n_blocks)
    if weight_type.name == "IQ1_M":  # the f16 scale lies in the top nibbles of four words
        words = raw[:, 48:56].view(np.uint16)
        bits = rng.normal(0, 0.05, n_blocks).astype(np.float16).view(np.uint16)
        for i in range(4):
            words[:, i] = words[:, i] & 0x0FFF | (bits >> (4 * i) & 15) << 12
    return raw.reshape(rows, -1)


_F16_OFFSETS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ1_S": (0,), "IQ1_M": (), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "MXFP4": (), "NVFP4": (), "Q2_0": (0,),
}  # fmt: skip
