"""A checkpoint that is no file: random but valid weights of any type, made when they are read.

For measuring a machine before a model is downloaded. Knows names, types and shapes that it is told;
no models. Row r of a matrix begins r blocks into a pool of random blocks, so that gigabytes are
handed out at the speed of memory; all blocks of a pool have finite scales, set so that a product
with unit inputs has unit size (root mean square of the weights: 1 / sqrt(n_cols)).
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from strata.core.errors import InputError
from strata.formats.checkpoint import Beside, Checkpoint
from strata.formats.discover import Found
from strata.formats.quants import dequantize
from strata.formats.tensor_info import TensorInfo
from strata.formats.weight_types import TYPES

U8 = NDArray[np.uint8]
Numbers = Callable[[str, tuple[int, ...]], NDArray[np.float32]]
"""(tensor name, shape) -> the numbers of a small float tensor (norms, biases, decays)."""

SCALE_AT: Mapping[str, int] = {
    "Q4_0": 0, "Q4_1": 0, "Q5_0": 0, "Q5_1": 0, "Q8_0": 0, "Q2_K": 80, "Q3_K": 108, "Q4_K": 0,
    "Q5_K": 0, "Q6_K": 208, "IQ2_XXS": 0, "IQ2_XS": 0, "IQ2_S": 0, "IQ3_XXS": 0, "IQ3_S": 0,
    "IQ4_NL": 0, "IQ4_XS": 0, "IQ1_S": 0, "Q2_0": 0, "TQ1_0": 52, "TQ2_0": 64,
}  # fmt: skip
"""Byte of a block's f16 scale; the f16 minimum, where there is one, lies right behind it."""
_FLOATS = ("F32", "F16", "BF16")
_OFFSETS = 4096
"""Tensors begin at one of so many places of their pool."""


def makeable(type_name: str) -> bool:
    """Whether weights of this type can be made up."""
    return type_name in SCALE_AT or type_name in (*_FLOATS, "MXFP4")


class MadeUpCheckpoint(Checkpoint):
    """A GGUF that nobody wrote. ``label`` stands where a path would.

    tensors: (name, weight type, shape). numbers: gives F32 tensors of one axis, and whatever else
    must not be random, by name. Bytes repeat for a label and seed.
    """

    def __init__(
        self,
        label: str,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        metadata: Mapping[str, Any],
        numbers: Numbers,
        seed: int = 0,
    ) -> None:
        infos = {name: _info(label, name, kind, shape) for name, kind, shape in tensors}
        kinds = {key: type(value).__name__ for key, value in metadata.items()}
        found = Found("gguf", Path(label), Path(label))
        super().__init__(found, (), infos, metadata, kinds, Beside())
        self.root = Path(label)
        self.paths = (Path(label),)
        self.size_bytes = sum(info.n_bytes for info in infos.values())
        self._numbers = numbers
        self._seed = seed
        self._pools: dict[tuple[str, int], U8] = {}
        self._lock = threading.Lock()

    def raw(self, name: str) -> U8:
        """The tensor's bytes, 1-D, a copy."""
        return np.ascontiguousarray(self.rows(name)).reshape(-1)

    def rows(self, name: str) -> U8:
        """The tensor's bytes by row, read-only uint8 [n_rows, row_bytes]; rows overlap in
        memory."""
        if self._closed:
            raise InputError(f"{self.path} is closed; open it again")
        info = self.info(name)
        if info.type.name == "F32":
            values = np.ascontiguousarray(self._numbers(name, info.shape), np.float32)
            made: U8 = values.reshape(info.n_rows, info.n_cols).view(np.uint8)
            made.flags.writeable = False
            return made
        row_bytes, step = info.type.row_bytes(info.n_cols), info.type.block_bytes
        n_blocks = _OFFSETS + info.n_rows + info.n_cols // info.type.block_weights
        start = zlib.crc32(name.encode()) % _OFFSETS
        pool = self._pool(info.type.name, info.n_cols, n_blocks)[start * step :]
        return as_strided(pool, (info.n_rows, row_bytes), (step, 1), writeable=False)

    def close(self) -> None:
        """Let the pools go (again: nothing)."""
        self._pools.clear()
        super().close()

    def _pool(self, kind: str, n_cols: int, n_blocks: int) -> U8:
        """At least n_blocks random blocks, uint8 [n]."""
        with self._lock:  # loading threads wait for one pool instead of making one each
            pool = self._pools.get((kind, n_cols))
            if pool is None or pool.size < n_blocks * TYPES[kind].block_bytes:
                pool = random_blocks(kind, n_blocks, n_cols**-0.5, self._seed).reshape(-1)
                self._pools[kind, n_cols] = pool
            return pool


def random_blocks(kind: str, n_blocks: int, rms: float, seed: int = 0) -> U8:
    """Valid blocks of a weight type, uint8 [n_blocks, block_bytes], whose weights have about this
    root mean square and no mean.

    InputError for a type that cannot be made up.
    """
    if not makeable(kind):
        raise InputError(
            f"weights of type {kind} cannot be made up; known: "
            f"{', '.join((*SCALE_AT, 'MXFP4', *_FLOATS))}"
        )
    # every type its own numbers, the same on every machine
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    if kind in _FLOATS:
        return _floats(kind, rng, n_blocks, rms)
    size = TYPES[kind].block_bytes
    blocks = np.frombuffer(rng.bytes(n_blocks * size), np.uint8).reshape(n_blocks, size).copy()
    if kind == "MXFP4":
        blocks[:, 0] = 127
        exponent = round(math.log2(rms / _rms(kind, blocks)))
        blocks[:, 0] = 127 + exponent
        return blocks
    at, has_min = SCALE_AT[kind], TYPES[kind].has_min
    scale, minimum = _calibrated(kind, blocks[:512].copy(), at, has_min, rms)
    if has_min:
        _put_f16(blocks, at, scale)
        _put_f16(blocks, at + 2, minimum)
    else:
        # the sign is the block's own, so that a longer pool begins like a shorter one
        signs = np.where(blocks[:, at] & 1, np.float32(1), np.float32(-1))
        _put_f16(blocks, at, np.asarray(scale * signs, np.float32))
    return blocks


def _calibrated(kind: str, sample: U8, at: int, has_min: bool, rms: float) -> tuple[float, float]:
    """(scale, minimum) that give a block's weights their size, and no mean where there is a
    minimum."""
    _put_f16(sample, at, 1.0)
    ratio = 0.0
    if has_min:
        _put_f16(sample, at + 2, 0.0)
        of_codes = float(_decoded(kind, sample).mean())
        _put_f16(sample, at, 0.0)
        _put_f16(sample, at + 2, 1.0)
        ratio = -of_codes / float(_decoded(kind, sample).mean())
        _put_f16(sample, at, 1.0)
        _put_f16(sample, at + 2, ratio)
    scale = rms / _rms(kind, sample)
    return scale, scale * ratio


def _decoded(kind: str, blocks: U8) -> NDArray[np.float32]:
    return np.asarray(dequantize(TYPES[kind], blocks))


def _rms(kind: str, blocks: U8) -> float:
    return float(np.sqrt(np.square(_decoded(kind, blocks[:512]).astype(np.float64)).mean()))


def _put_f16(blocks: U8, at: int, values: float | NDArray[np.float32]) -> None:
    wide = np.broadcast_to(np.asarray(values, np.float32), len(blocks))
    blocks[:, at : at + 2] = wide.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _floats(kind: str, rng: np.random.Generator, n: int, rms: float) -> U8:
    values = rng.standard_normal(n, np.float32) * np.float32(rms)
    if kind == "F16":
        return values.astype(np.float16).view(np.uint8).reshape(n, 2)
    raw = values.view(np.uint8).reshape(n, 4)
    # the upper half of an f32 is a BF16, rounded down
    return np.ascontiguousarray(raw[:, 2:]) if kind == "BF16" else raw


def _info(label: str, name: str, kind: str, shape: tuple[int, ...]) -> TensorInfo:
    weight_type = TYPES[kind]
    n_bytes = math.prod(shape[:-1]) * weight_type.row_bytes(shape[-1])
    return TensorInfo(name, shape, weight_type, Path(label), 0, n_bytes)
