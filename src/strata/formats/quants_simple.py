"""Decoders of the types without super-blocks: one f16 or small-float scale per block.

Each takes blocks uint8 [B, block_bytes] and gives (codes int8 [B, n], scale f32 [B, n / group],
minimum or None) with w = codes * scale - minimum (numerics contract, section 2).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
F32 = NDArray[np.float32]
Parts = tuple[I8, F32, F32 | None]
Decoder = Callable[[U8], Parts]


def f16_at(blocks: U8, offset: int) -> F32:
    """The f16 at that byte of every block, widened: f32 [B, 1]."""
    field = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return field.view(np.float16).astype(np.float32)


def u16_at(blocks: U8, offset: int, count: int) -> NDArray[np.uint16]:
    """That many little-endian 16-bit words of every block: [B, count]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2 * count]).view(np.uint16)


def u32_at(blocks: U8, offset: int, count: int) -> NDArray[np.uint32]:
    """That many little-endian 32-bit words of every block: [B, count]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 4 * count]).view(np.uint32)


def nibbles(packed: U8) -> U8:
    """[B, n] bytes -> [B, 2n]: all low halves first, then all high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def signed(codes: U8, bias: int) -> I8:
    """Unsigned codes minus a bias, as int8 (wraps exactly)."""
    return (codes - np.uint8(bias)).view(np.int8)


FP4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""e2m1 values doubled, which makes them integers."""

IQ4_CODES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""The non-linear 4-bit levels of IQ4_NL and IQ4_XS (read off ggml's dequantization)."""


def _half_e8m0() -> F32:
    """2^(e - 128) for every exponent byte e: the scale that goes with doubled e2m1 values."""
    return np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _half_ue4m3() -> F32:
    """Half the value of every NVFP4 scale byte; ggml reads 0x7f as 0 but ignores a set top bit."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(np.float32), -9),
        np.ldexp(1 + mantissa.astype(np.float32) / 8, exponent - 7),
    )
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


HALF_E8M0 = _half_e8m0()
HALF_UE4M3 = _half_ue4m3()


def _five_bits(blocks: U8, offset: int) -> U8:
    """Q5_0 and Q5_1: 32 top bits as one word, then 16 bytes of nibbles: [B, 32] in 0..31."""
    top = np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")
    return nibbles(blocks[:, offset + 4 : offset + 20]) | top << np.uint8(4)


def _q4_0(blocks: U8) -> Parts:
    return signed(nibbles(blocks[:, 2:]), 8), f16_at(blocks, 0), None


def _q4_1(blocks: U8) -> Parts:
    return nibbles(blocks[:, 4:]).view(np.int8), f16_at(blocks, 0), -f16_at(blocks, 2)


def _q5_0(blocks: U8) -> Parts:
    return signed(_five_bits(blocks, 2), 16), f16_at(blocks, 0), None


def _q5_1(blocks: U8) -> Parts:
    return _five_bits(blocks, 4).view(np.int8), f16_at(blocks, 0), -f16_at(blocks, 2)


def _q8_0(blocks: U8) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), f16_at(blocks, 0), None


def _q2_0(blocks: U8) -> Parts:
    # four codes a byte, low bits first; one scale for 64 weights
    codes = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    return signed(codes.reshape(-1, 64), 1), np.repeat(f16_at(blocks, 0), 2, axis=1), None


def _mxfp4(blocks: U8) -> Parts:
    return FP4_CODES[nibbles(blocks[:, 1:])], HALF_E8M0[blocks[:, :1]], None


def _nvfp4(blocks: U8) -> Parts:
    # four sub-blocks of 16: 4 scale bytes, then 8 bytes of nibbles each
    codes = FP4_CODES[nibbles(blocks[:, 4:].reshape(-1, 8))]
    return codes.reshape(-1, 64), HALF_UE4M3[blocks[:, :4]], None


def _trits(packed: U8, n: int) -> U8:
    """[B, m] bytes of base-3 fractions -> [B, n * m]: digit 0 of all bytes, then digit 1, ..."""
    shifted = packed[:, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:n, None]
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _tq1_0(blocks: U8) -> Parts:
    # 32 bytes of 5 digits, 16 bytes of 5, 4 bytes of 4; then the scale
    digits = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    codes = signed(np.concatenate(digits, axis=1), 1)
    return codes, np.repeat(f16_at(blocks, 52), 8, axis=1), None


def _tq2_0(blocks: U8) -> Parts:
    # two halves of 32 bytes; bit pair l of byte m is weight 32 l + m of the half
    halves = blocks[:, :64].reshape(-1, 2, 1, 32)
    codes = halves >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return signed(codes.reshape(-1, 256), 1), np.repeat(f16_at(blocks, 64), 8, axis=1), None


DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_0": _q2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
