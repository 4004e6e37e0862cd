"""What the CPU benchmark reads: rows of random weights, copied over more memory than caches hold.

Knows no clocks. Invariant: between two reads of the same chunk at least a whole arena is read, so
nothing is found in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from strata.core.errors import SettingError
from strata.experts.store import anonymous
from strata.formats.quants_simple import U8
from strata.formats.tiles import Layout, matrix_bytes
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight
from strata.memory.numa import interleave
from strata.native.recode import encode_into

MIB = 1 << 20
CACHES = 4.5
"""Size of an arena in caches of the last level."""
LEAST_BYTES = 64 * MIB
CHUNK_BYTES = 4 * MIB
"""Read by one thread in one sample: handing over work (some us) is below 2 % of it, and on a busy
machine some samples end before they are interrupted."""

_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the f16 scales and minimums of a block lie; other types have none in one place."""


def random_rows(name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> U8:
    """Rows of a weight type with random codes and ordinary scales, uint8 [n_rows, row_bytes].

    Codes use every value, as a model's do; scales are finite and far from denormal numbers, which
    some processors compute slowly.
    """
    kind = TYPES[name]
    if kind.kind == "float":
        return _float_rows(name, n_rows, n_cols, rng)
    shape = (n_rows * n_cols // kind.block_weights, kind.block_bytes)
    blocks = rng.integers(0, 256, shape, np.uint8)
    for offset in _SCALES.get(name, ()):
        scale = rng.uniform(0.01, 0.1, (len(blocks), 1)).astype(np.float16)
        if offset == 2 and kind.block_weights == 32:
            scale *= -8  # a minimum that is added: about half the codes times their scale
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(116, 124, len(blocks))
    if name == "NVFP4":
        blocks[:, :4] = rng.integers(0x08, 0x20, (len(blocks), 4))
    if name == "IQ1_M":
        # its f16 is spread over the top nibbles of four words, the last of which holds the sign
        # and the exponent: 0x2... is 0.008 to 0.03
        words = blocks[:, 48:56].view(np.uint16)
        words[:, 3] = words[:, 3] & 0x0FFF | 0x2000
    return blocks.reshape(n_rows, -1)


def _float_rows(name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> U8:
    x = torch.from_numpy(rng.normal(0, 0.05, (n_rows, n_cols)))
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if name not in dtypes:
        raise SettingError(f"--types {name}: this type is not measured; F32, F16 and BF16 are")
    return np.ascontiguousarray(x.to(dtypes[name]).view(torch.uint8).numpy())


def arena_bytes(cache_bytes: int, free_bytes: int) -> int:
    """Bytes of memory to read from: some caches' worth. SettingError when it is not free."""
    wanted = max(LEAST_BYTES, int(CACHES * cache_bytes))
    # three areas lie side by side, and a good part of what is free is left to others
    if wanted > free_bytes // 4:
        raise SettingError(
            f"reading memory and not the {cache_bytes / MIB:.0f} MiB of cache takes three areas of "
            f"{wanted / MIB:.0f} MiB, and only {free_bytes / MIB:.0f} MiB are free; stop other "
            f"programs"
        )
    return wanted


@dataclass(frozen=True)
class Chunks:
    """Copies of one matrix that fill an arena; sample i reads ``matrices[i % len(matrices)]``."""

    matrices: tuple[Weight, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of one matrix as it lies there."""
        return self.matrices[0].n_bytes


class Arena:
    """Memory that is given pages once, of all nodes in turn, and holds one type after another."""

    def __init__(self, n_bytes: int, nodes: Sequence[int] = (0,)) -> None:
        self.memory = anonymous(n_bytes)
        if len(nodes) > 1:
            interleave(self.memory, nodes)
        self.memory.fill_(1)

    def fill(self, name: str, layout: Layout, raw: U8, n_cols: int) -> Chunks:
        """The same matrix as often as it fits; raw: its rows as a file holds them."""
        n_rows = len(raw)
        n_bytes = matrix_bytes(name, layout, n_rows, n_cols)
        if layout == "tiles":
            first = self.memory[:n_bytes]
            encode_into(name, raw, first.numpy())
        else:
            first = torch.from_numpy(raw.reshape(-1))
        copies = self.memory.numel() // n_bytes
        assert copies > 1, "a chunk is at most half an arena"
        area = self.memory[: copies * n_bytes].view(copies, n_bytes)
        area[1 if layout == "tiles" else 0 :].copy_(first)
        shape = (n_bytes,) if layout == "tiles" else (n_rows, n_bytes // n_rows)
        return Chunks(
            tuple(
                Weight(name, n_rows, n_cols, area[i].view(shape), layout=layout)
                for i in range(copies)
            )
        )


def chunk_rows(name: str, n_cols: int, workers: int, arena: int) -> int:
    """Rows of a matrix of about 4 MiB for each worker, whole tiles, at most a quarter arena."""
    most = min(CHUNK_BYTES * workers, arena // 4)
    return max(16, most // TYPES[name].row_bytes(n_cols) // 16 * 16)
