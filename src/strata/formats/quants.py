"""Decoding weight rows: raw bytes in, exact codes and scales (or f32) out.

Knows no files and no torch. Quantized types decode to w = codes * scale - minimum (numerics
contract, section 2), and that w equals ggml's dequantization bit for bit. Rows are uint8
[rows, row_bytes] as they lie in the file. Work is done in pieces of about a million weights, so
memory beyond the result stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from strata.core.errors import FormatError, UnsupportedError
from strata.formats import quants_iq, quants_k, quants_simple
from strata.formats.quants_simple import F32, I8, U8, Decoder
from strata.formats.weight_types import WeightType

DECODERS: dict[str, Decoder] = {
    **quants_simple.DECODERS,
    **quants_k.DECODERS,
    **quants_iq.DECODERS,
}

_PIECE_WEIGHTS = 1 << 20
_F16_OVERFLOW = np.float32(65520)
"""The smallest magnitude that rounds to infinity in f16."""


@dataclass(frozen=True)
class Codes:
    """Decoded rows: codes int8 [rows, n]; scale, and minimum if there is one, [rows, n / group]."""

    codes: I8
    scale: F32
    minimum: F32 | None


def decode(weight_type: WeightType, raw: U8) -> Codes:
    """Integer codes, scales and minima of rows of a quantized type.

    raw: uint8 [rows, row_bytes]. UnsupportedError for a type that is not quantized, FormatError
    when row_bytes is not whole blocks.
    """
    decoder = DECODERS.get(weight_type.name)
    if decoder is None:
        raise UnsupportedError(
            f"{weight_type.name} has no integer codes; use dequantize() for float types"
        )
    rows, n = len(raw), n_cols(weight_type, raw)
    groups = n // weight_type.group
    codes = np.empty((rows, n), np.int8)
    scale = np.empty((rows, groups), np.float32)
    minimum = np.empty((rows, groups), np.float32) if weight_type.has_min else None
    for piece in _pieces(rows, n):
        blocks = raw[piece].reshape(-1, weight_type.block_bytes)
        c, s, m = decoder(blocks)
        codes[piece] = c.reshape(-1, n)
        scale[piece] = s.reshape(-1, groups)
        if minimum is not None and m is not None:
            minimum[piece] = m.reshape(-1, groups)
    return Codes(codes, scale, minimum)


def dequantize(weight_type: WeightType, raw: U8) -> F32:
    """Rows as f32 [rows, n] from uint8 [rows, row_bytes].

    Quantized: codes * scale - minimum, equal to ggml's values bit for bit. Floats up to 32 bits are
    widened exactly, F64 is rounded to f32, F8_E4M3_B128 is f32(e4m3) * block scale, rounded once.
    UnsupportedError for integer types, FormatError when row_bytes is not whole blocks.
    """
    rows, n = len(raw), n_cols(weight_type, raw)
    out = np.empty((rows, n), np.float32)
    if weight_type.kind == "integer":
        raise UnsupportedError(f"{weight_type.name} holds integers, not weights")
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in _pieces(rows, n):
            if weight_type.kind == "float":
                out[piece] = _widen(weight_type.name, np.ascontiguousarray(raw[piece]))
                continue
            values(decode(weight_type, raw[piece]), out[piece])
    return out


def values(c: Codes, out: F32 | None = None) -> F32:
    """codes * scale - minimum, f32 [rows, n], into ``out`` where given (contiguous)."""
    if out is None:
        out = np.empty(c.codes.shape, np.float32)
    groups = c.scale.shape[1]
    grouped = out.reshape(len(out), groups, c.codes.shape[1] // max(groups, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(c.codes.reshape(grouped.shape), c.scale[:, :, None], out=grouped)
        if c.minimum is not None:
            grouped -= c.minimum[:, :, None]
    return out


def n_cols(weight_type: WeightType, raw: U8) -> int:
    """Weights of one row of raw uint8 [rows, row_bytes]; FormatError when not whole blocks."""
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] % weight_type.block_bytes:
        raise FormatError(
            f"{raw.dtype} array of shape {list(raw.shape)} is not rows of {weight_type.name}, "
            f"which needs uint8 [rows, multiple of {weight_type.block_bytes}]; "
            f"the tensor is cut or its type is wrong"
        )
    n_blocks: int = raw.shape[1] // weight_type.block_bytes
    return n_blocks * weight_type.block_weights


def _pieces(rows: int, n: int) -> Iterator[slice]:
    """Row ranges of about a million weights."""
    step = max(1, _PIECE_WEIGHTS // max(n, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _fp8_values(exponent_bits: int) -> F32:
    """Value of every byte: e4m3 (no infinity, 0x7f is NaN) or e5m2 (infinity and NaN as IEEE)."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    byte = np.arange(128)
    exponent, mantissa = byte >> mantissa_bits, byte & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    value = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if exponent_bits == 4:
        value[127] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.concatenate((value, -value)).astype(np.float32)


FP8_E4M3 = _fp8_values(4)
FP8_E5M2 = _fp8_values(5)


def _widen(name: str, raw: U8) -> F32:
    """Contiguous raw rows of a float type as f32 [rows, n]."""
    if name == "F32":
        return raw.view(np.float32)
    if name in ("F16", "F64"):
        return raw.view(np.float16 if name == "F16" else np.float64).astype(np.float32)
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name == "F8_E4M3":
        return FP8_E4M3[raw]
    if name == "F8_E5M2":
        return FP8_E5M2[raw]
    if name == "F8_E4M3_B128":
        blocks = raw.reshape(len(raw), -1, 132)
        scale = np.ascontiguousarray(blocks[:, :, 128:]).view(np.float32)
        return (FP8_E4M3[blocks[:, :, :128]] * scale).reshape(len(raw), -1)
    raise UnsupportedError(f"no decoder for float type {name}")


def quantize_q8_0(x: F32) -> U8:
    """Rows f32 [rows, n] as Q8_0, uint8 [rows, n / 32 * 34]: the same bytes as ggml makes.

    FormatError when n is not a multiple of 32, or when a value is NaN, infinite or too large for an
    f16 scale.
    """
    rows, n = x.shape
    if n % 32:
        raise FormatError(f"{n} columns are not whole Q8_0 blocks of 32; keep this tensor F16")
    out = np.empty((rows, n // 32 * 34), np.uint8)
    for piece in _pieces(rows, n):
        blocks = np.ascontiguousarray(x[piece], np.float32).reshape(-1, 32)
        amax = np.abs(blocks).max(axis=1, keepdims=True)
        scale = amax / np.float32(127)
        if not (scale < _F16_OVERFLOW).all():
            raise FormatError(
                f"a block's largest magnitude is {amax.max()}, beyond what Q8_0's f16 scale can "
                f"hold; keep this tensor in a float type"
            )
        # at 2^-128 and below the reciprocal overflows; the f16 scale is 0 long before
        usable = scale > np.float32(2.0**-128)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=usable)
        scaled = blocks * inverse
        whole = np.trunc(scaled)
        # C's roundf: halves away from zero
        whole += np.copysign(np.abs(scaled - whole) >= np.float32(0.5), scaled)
        packed = np.empty((len(blocks), 34), np.uint8)
        packed[:, :2] = scale.astype(np.float16).view(np.uint8)
        packed[:, 2:] = whole.astype(np.int8).view(np.uint8)
        out[piece] = packed.reshape(-1, out.shape[1])
    return out


def mxfp4_from_gptoss(blocks: U8, scales: U8) -> U8:
    """gpt-oss blocks uint8 [..., nb, 16] and scales uint8 [..., nb] as MXFP4 rows [..., nb * 17].

    Exact: same values, other order. The checkpoint's byte j holds weights 2j (low half) and 2j + 1;
    an MXFP4 block is the exponent byte, then byte j with weights j (low half) and j + 16.
    FormatError when the two shapes do not belong together.
    """
    if blocks.shape[-1:] != (16,) or blocks.shape[:-1] != scales.shape:
        raise FormatError(
            f"MXFP4 blocks {list(blocks.shape)} and scales {list(scales.shape)} do not belong "
            f"together; expected [..., n, 16] and [..., n]"
        )
    out = np.empty((*scales.shape, 17), np.uint8)
    out[..., 0] = scales
    even, odd = blocks & 15, blocks >> 4
    # weights 0..15 lie in bytes 0..7 and become the low halves, 16..31 the high halves
    out[..., 1::2] = even[..., :8] | even[..., 8:] << 4
    out[..., 2::2] = odd[..., :8] | odd[..., 8:] << 4
    return out.reshape(*scales.shape[:-1], -1)


def fp8_b128_rows(weight: U8, scale_inv: F32) -> U8:
    """Block-FP8 e4m3 bytes [n, k], scales f32 [ceil(n/128), ceil(k/128)], as F8_E4M3_B128 rows.

    Result uint8 [n, k / 128 * 132]: per 128 columns the bytes, then the f32 scale of their block.
    UnsupportedError when k is not a multiple of 128, FormatError when the shapes do not fit.
    """
    n, k = weight.shape
    if k % 128:
        raise UnsupportedError(
            f"block-FP8 matrix [{n}, {k}]: the width is not a multiple of 128; convert it to BF16"
        )
    if scale_inv.shape != (-(-n // 128), k // 128):
        raise FormatError(
            f"block-FP8 matrix [{n}, {k}] has scales {list(scale_inv.shape)}, expected "
            f"[{-(-n // 128)}, {k // 128}] (blocks of 128 x 128)"
        )
    out = np.empty((n, k // 128, 132), np.uint8)
    out[:, :, :128] = weight.reshape(n, -1, 128)
    row_scale = np.repeat(np.ascontiguousarray(scale_inv, np.float32), 128, axis=0)[:n]
    out[:, :, 128:] = row_scale.view(np.uint8).reshape(n, -1, 4)
    return out.reshape(n, -1)
