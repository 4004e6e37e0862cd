"""Decoders of the IQ types: weights are looked up in grids of 4 or 8, with signs beside them.

Same shapes as in quants_simple. ib counts sub-blocks of 32 weights, 8 in a super-block of 256.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.formats.quants_grids import grid
from strata.formats.quants_simple import (
    I8,
    IQ4_CODES,
    U8,
    Decoder,
    Parts,
    f16_at,
    nibbles,
    u16_at,
    u32_at,
)

_HALF = np.float32(0.5)
_EIGHT = np.uint16(8)


def _sign_factors(n_bits: int) -> I8:
    """Sign pattern -> 8 factors +1 or -1: [2^n_bits, 8]; of 7 bits the 8th is the parity."""
    bits = np.arange(2**n_bits)[:, None] >> np.arange(8) & 1
    if n_bits == 7:
        bits[:, 7] = bits.sum(1) & 1
    return (1 - 2 * bits).astype(np.int8)


_SIGNS_7 = _sign_factors(7)
_SIGNS_8 = _sign_factors(8)


def interleaved_nibbles(packed: U8) -> U8:
    """[B, m] -> [B, 2m]: low half, high half of each byte in turn."""
    return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def _packed_signs(words: NDArray[np.uint32]) -> tuple[I8, NDArray[np.float32]]:
    """One word per 32 weights: four 7-bit sign patterns and a 4-bit scale s.

    Gives the factors [B, 256] and 0.5 + s as f32 [B, 8].
    """
    pattern = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return _SIGNS_7[pattern].reshape(-1, 256), _HALF + (words >> 28).astype(np.float32)


def _iq2_xxs(blocks: U8) -> Parts:
    # per 32 weights: four grid bytes, then the word of signs and scale
    words = u32_at(blocks, 2, 16)
    index = np.ascontiguousarray(words[:, ::2]).view(np.uint8)
    signs, scale = _packed_signs(words[:, 1::2])
    codes = grid("IQ2_XXS")[index].reshape(-1, 256) * signs
    return codes, f16_at(blocks, 0) * scale * np.float32(0.25), None


def _iq2_xs(blocks: U8) -> Parts:
    # per 8 weights a word: 9 bits of grid, 7 of signs
    words = u16_at(blocks, 2, 32)
    codes = grid("IQ2_XS")[words & 511] * _SIGNS_7[words >> 9]
    scale = _HALF + interleaved_nibbles(blocks[:, 66:74])
    return codes.reshape(-1, 256), f16_at(blocks, 0) * scale * np.float32(0.25), None


def _iq2_s(blocks: U8) -> Parts:
    top = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    index = blocks[:, 2:34] | top.reshape(-1, 32).astype(np.uint16) << 8
    codes = grid("IQ2_S")[index] * _SIGNS_8[blocks[:, 34:66]]
    scale = _HALF + interleaved_nibbles(blocks[:, 74:82])
    return codes.reshape(-1, 256), f16_at(blocks, 0) * scale * np.float32(0.25), None


def _iq3_xxs(blocks: U8) -> Parts:
    signs, scale = _packed_signs(u32_at(blocks, 66, 8))
    codes = grid("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 256) * signs
    return codes, f16_at(blocks, 0) * scale * _HALF, None


def _iq3_s(blocks: U8) -> Parts:
    top = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    index = blocks[:, 2:66] | top.astype(np.uint16) << 8
    signs = _SIGNS_8[blocks[:, 74:106]].reshape(-1, 256)
    scale = f16_at(blocks, 0) * (1 + 2 * interleaved_nibbles(blocks[:, 106:110]))
    return grid("IQ3_S")[index].reshape(-1, 256) * signs, scale, None


def _iq1_codes(index: NDArray[np.uint16], negative: NDArray[np.bool_]) -> I8:
    """Points of {-1, 0, 1} shifted by an eighth, in eighths: [B, 32] indices -> [B, 256]."""
    shift = np.where(negative, np.int8(-1), np.int8(1))
    return (grid("IQ1")[index] * np.int8(8) + shift[:, :, None]).reshape(-1, 256)


def _iq1_s(blocks: U8) -> Parts:
    # per 32 weights a word: four times 3 high grid bits, 3 bits of scale, the sign of the shift
    words = u16_at(blocks, 34, 8)
    top = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    index = blocks[:, 2:34] | top.reshape(-1, 32).astype(np.uint16) << _EIGHT
    codes = _iq1_codes(index, np.repeat(words >= 0x8000, 4, axis=1))
    scale = f16_at(blocks, 0) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    return codes, scale / np.float32(8), None


def _iq1_m(blocks: U8) -> Parts:
    # per 8 weights a nibble: 3 high grid bits and the sign of the shift; per 16 a 3-bit scale, four
    # to a word; the top nibbles of the four words are the f16
    fields = interleaved_nibbles(blocks[:, 32:48])
    index = blocks[:, :32] | (fields & 7).astype(np.uint16) << _EIGHT
    codes = _iq1_codes(index, fields >= 8)
    words = u16_at(blocks, 48, 4)
    nibble = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    super_scale = np.bitwise_or.reduce(nibble, axis=1).view(np.float16).astype(np.float32)
    scale = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    scale_f32 = (2 * scale + 1).reshape(-1, 16).astype(np.float32)
    return codes, super_scale[:, None] * scale_f32 / np.float32(8), None


def _iq4_nl(blocks: U8) -> Parts:
    return IQ4_CODES[nibbles(blocks[:, 2:])], f16_at(blocks, 0), None


def _iq4_xs(blocks: U8) -> Parts:
    codes = IQ4_CODES[nibbles(blocks[:, 8:].reshape(-1, 16))].reshape(-1, 256)
    top = u16_at(blocks, 2, 1) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    six_bits = interleaved_nibbles(blocks[:, 4:8]) | top << 4
    return codes, f16_at(blocks, 0) * (six_bits.astype(np.float32) - 32), None


DECODERS: dict[str, Decoder] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
