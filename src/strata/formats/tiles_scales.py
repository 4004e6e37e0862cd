"""Scale fields of every quantized type, unconverted, as tiles store them.

Each function takes blocks uint8 [B, block_bytes]; fields are [B, values per block]: f16 bits as
uint16, small integers as bytes (signed ones as their two's complement). Law:
docs/decisions/003-tiles.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.formats.quants_iq import interleaved_nibbles
from strata.formats.quants_k import k_sub_scales, q3_k_sub_scales
from strata.formats.quants_simple import HALF_UE4M3, U8, u16_at, u32_at

_SIGN = np.uint16(0x8000)


@dataclass(frozen=True)
class Fields:
    """Scales and minima of blocks, and the f16 above them for 256 columns where there is one."""

    scale: NDArray[Any]
    minimum: NDArray[Any] | None = None
    super_scale: NDArray[np.uint16] | None = None
    super_minimum: NDArray[np.uint16] | None = None


HALF_UE4M3_7 = HALF_UE4M3.copy()
HALF_UE4M3_7[127] = HALF_UE4M3[255]
"""Half the value of an NVFP4 scale byte in tiles, where 0x7f is a number and the top bit clear."""


def _ue4m3(blocks: U8) -> Fields:
    # the file's exceptions are settled here: 0x7f reads as 0, a set top bit does not count
    byte = blocks[:, :4]
    return Fields(np.where(byte == 0x7F, np.uint8(0), byte & np.uint8(0x7F)))


def _f16(blocks: U8, offset: int) -> Fields:
    return Fields(u16_at(blocks, offset, 1))


def _f16_pair(blocks: U8) -> Fields:
    # w = c * s - m: the file adds its minimum, the contract subtracts it
    return Fields(u16_at(blocks, 0, 1), u16_at(blocks, 2, 1) ^ _SIGN)


def _q2_k(blocks: U8) -> Fields:
    both = blocks[:, :16]
    return Fields(both & 15, both >> 4, u16_at(blocks, 80, 1), u16_at(blocks, 82, 1))


def _q3_k(blocks: U8) -> Fields:
    return Fields(q3_k_sub_scales(blocks).view(np.uint8), super_scale=u16_at(blocks, 108, 1))


def _q45_k(blocks: U8) -> Fields:
    scale, minimum = k_sub_scales(blocks[:, 4:16])
    return Fields(scale, minimum, u16_at(blocks, 0, 1), u16_at(blocks, 2, 1))


def _q6_k(blocks: U8) -> Fields:
    return Fields(blocks[:, 192:208], super_scale=u16_at(blocks, 208, 1))


def _odd(small: NDArray[Any], d: NDArray[np.uint16]) -> Fields:
    """Scales of the IQ types: f16 times an odd number (times a power of two)."""
    return Fields((2 * small + 1).astype(np.uint8), super_scale=d)


def _odd_nibbles(blocks: U8, start: int, stop: int) -> Fields:
    return _odd(interleaved_nibbles(blocks[:, start:stop]), u16_at(blocks, 0, 1))


def _odd_words(blocks: U8, offset: int, step: int) -> Fields:
    # the top 4 bits of every word of signs
    words = u32_at(blocks, offset, 8 * step)[:, step - 1 :: step]
    return _odd(words >> 28, u16_at(blocks, 0, 1))


def _iq1_s(blocks: U8) -> Fields:
    return _odd(u16_at(blocks, 34, 8) >> 12 & 7, u16_at(blocks, 0, 1))


def _iq1_m(blocks: U8) -> Fields:
    # the f16 lies in the top nibbles of four words; below, four 3-bit scales a word
    words = u16_at(blocks, 48, 4)
    nibble = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(nibble, axis=1, keepdims=True)
    small = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    return _odd(small.reshape(-1, 16), d)


def _iq4_xs(blocks: U8) -> Fields:
    top = u16_at(blocks, 2, 1) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    six_bits = interleaved_nibbles(blocks[:, 4:8]) | top << 4
    return Fields((six_bits - 32).astype(np.uint8), super_scale=u16_at(blocks, 0, 1))


FIELDS: dict[str, Callable[[U8], Fields]] = {
    **dict.fromkeys(("Q8_0", "Q5_0", "Q4_0", "Q2_0", "IQ4_NL"), partial(_f16, offset=0)),
    "TQ1_0": partial(_f16, offset=52),
    "TQ2_0": partial(_f16, offset=64),
    "Q4_1": _f16_pair,
    "Q5_1": _f16_pair,
    "MXFP4": lambda blocks: Fields(blocks[:, :1]),
    "NVFP4": _ue4m3,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q45_k,
    "Q5_K": _q45_k,
    "Q6_K": _q6_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": partial(_odd_words, offset=2, step=2),
    "IQ2_XS": partial(_odd_nibbles, start=66, stop=74),
    "IQ2_S": partial(_odd_nibbles, start=74, stop=82),
    "IQ3_XXS": partial(_odd_words, offset=66, step=1),
    "IQ3_S": partial(_odd_nibbles, start=106, stop=110),
    "IQ4_XS": _iq4_xs,
}
