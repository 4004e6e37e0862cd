"""Decoders of the K types: super-blocks of 256 with small integer scales times f16.

Same shapes as in quants_simple. The products f16 scale * integer sub-scale are exact in f32.
"""

from __future__ import annotations

import numpy as np

from strata.formats.quants_simple import I8, U8, Decoder, Parts, f16_at, nibbles, signed

_PAIRS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]
_ONE, _THREE = np.uint8(1), np.uint8(3)
_TWO, _FOUR = np.uint8(2), np.uint8(4)


def _two_bits(packed: U8) -> U8:
    """64 bytes -> [B, 256]: in each half, bit pair l of byte m is weight 32 l + m."""
    return (packed.reshape(-1, 2, 1, 32) >> _PAIRS & _THREE).reshape(-1, 256)


def _one_bit(packed: U8) -> U8:
    """32 bytes -> [B, 256]: bit l of byte m is weight 32 l + m."""
    return (packed[:, None, :] >> _BITS & _ONE).reshape(-1, 256)


def _four_bits(packed: U8) -> U8:
    """128 bytes -> [B, 256]: each run of 32 bytes is 32 low halves, then 32 high halves."""
    runs = packed.reshape(-1, 4, 32)
    return np.stack((runs & 15, runs >> 4), axis=2).reshape(-1, 256)


def k_sub_scales(packed: U8) -> tuple[U8, U8]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima, [B, 8] each."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)
    minimum = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)
    return scale, minimum


def q3_k_sub_scales(blocks: U8) -> I8:
    """The sixteen 6-bit scales of Q3_K, -32..31: [B, 16]."""
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    top = (high[:, None, :] >> _PAIRS & _THREE).reshape(-1, 16)
    return signed(nibbles(low) | top << _FOUR, 32)


def _q2_k(blocks: U8) -> Parts:
    scale = f16_at(blocks, 80) * (blocks[:, :16] & 15)
    minimum = f16_at(blocks, 82) * (blocks[:, :16] >> 4)
    return _two_bits(blocks[:, 16:80]).view(np.int8), scale, minimum


def _q3_k(blocks: U8) -> Parts:
    # the high bit counts +4; codes are stored +4
    codes = signed(_two_bits(blocks[:, 32:96]) | _one_bit(blocks[:, :32]) << _TWO, 4)
    return codes, f16_at(blocks, 108) * q3_k_sub_scales(blocks), None


def _q4_k(blocks: U8) -> Parts:
    scale, minimum = k_sub_scales(blocks[:, 4:16])
    codes = _four_bits(blocks[:, 16:144]).view(np.int8)
    return codes, f16_at(blocks, 0) * scale, f16_at(blocks, 2) * minimum


def _q5_k(blocks: U8) -> Parts:
    scale, minimum = k_sub_scales(blocks[:, 4:16])
    codes = _four_bits(blocks[:, 48:176]) | _one_bit(blocks[:, 16:48]) << 4
    return codes.view(np.int8), f16_at(blocks, 0) * scale, f16_at(blocks, 2) * minimum


def _q6_k(blocks: U8) -> Parts:
    # in each half of 128: 64 bytes of nibbles (low halves, then high halves), 32 bytes of bit pairs
    low = nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
    codes = signed(low | _two_bits(blocks[:, 128:192]) << _FOUR, 32)
    scale = f16_at(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return codes, scale, None


DECODERS: dict[str, Decoder] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
