# mypy: allow-untyped-defs, allow-untyped-decorators
"""Head vectors of a cache inside Triton programs, plain or encoded; formats: the package docstring.

Knows no grids. BITS: 8, 4, or the width of a float cache, which has no scales. GROUP: numbers of a
scale, a power of two. Vector (j, g) of a cache [n, G, d] is number j * G + g; encoded caches are
contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.kv_quant.ref import bits_of
from strata.kernels.triton_common import INTERPRET, rint


@dataclass(frozen=True)
class KvScales:
    """Scales of encoded keys and values: f16 [n, G, d / group], contiguous."""

    k: torch.Tensor
    v: torch.Tensor


def kv_args(
    k: torch.Tensor, v: torch.Tensor, scales: KvScales | None, dims: tuple[int, int]
) -> dict[str, object]:
    """Arguments of a kernel that reads or writes caches of that many key and value dims."""
    bits = bits_of(k.dtype)
    assert v.dtype == k.dtype, f"keys of {k.dtype}, values of {v.dtype}"
    if bits > 8:
        assert scales is None, f"a cache of {k.dtype} has no scales"
        return {"k_scale": k, "v_scale": v, "BITS": bits, "K_GROUP": 1, "V_GROUP": 1}
    assert scales is not None and k.is_contiguous() and v.is_contiguous(), "encoded caches"
    groups = [d // s.shape[-1] for d, s in zip(dims, (scales.k, scales.v), strict=True)]
    assert all(g & (g - 1) == 0 for g in groups), f"groups of {groups}: powers of two are needed"
    return {
        "k_scale": scales.k, "v_scale": scales.v, "BITS": bits, "K_GROUP": groups[0],
        "V_GROUP": groups[1],
    }  # fmt: skip


@triton.jit
def _as_loaded(x):
    """x f16, whose origin the compiler cannot see.

    Triton 3.6 deals a product's operands to threads by the width of the loads behind them. That of
    4-bit codes (and of codes in general, in another order of sums) needs more columns than a chunk
    may have: the product then counts some twice.
    """
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
        )


@triton.jit
def _from_bytes(code):
    """int8 as f16: 0x6400 | byte is 1024 + byte (conversions are the slowest instructions)."""
    if INTERPRET:
        return code.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, c;
            xor.b32 t, $2, 0x80808080;
            mov.b32 c, 0x64806480;
            prmt.b32 $0, t, 0x64646464, 0x4140;
            prmt.b32 $1, t, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, $0, c;
            sub.rn.f16x2 $1, $1, c;
            }""",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _from_halves(pair):
    """Low and high half of each byte, less 8, as f16."""
    if INTERPRET:
        wide = pair.to(tl.int32)
        return ((wide & 15) - 8).to(tl.float16), ((wide >> 4) - 8).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, c;
            and.b32 t, $4, 0x0f0f0f0f;
            shr.u32 u, $4, 4;
            and.b32 u, u, 0x0f0f0f0f;
            mov.b32 c, 0x64086408;
            prmt.b32 $0, t, 0x64646464, 0x4140;
            prmt.b32 $1, t, 0x64646464, 0x4342;
            prmt.b32 $2, u, 0x64646464, 0x4140;
            prmt.b32 $3, u, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, $0, c;
            sub.rn.f16x2 $1, $1, c;
            sub.rn.f16x2 $2, $2, c;
            sub.rn.f16x2 $3, $3, c;
            }""",
            "=&r,=&r,=&r,=&r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def load_vectors(
    cache, scale, vector, offset, ok, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """[N, BLOCK] numbers of some vectors, f16 where they are encoded; 0 where not ok and from D on.

    vector: int64 [N], numbers of encoded vectors; offset: int64 [N], where plain ones begin.
    """
    d = tl.arange(0, BLOCK)[None, :]
    ok_d = ok[:, None] & (d < D)
    if BITS > 8:
        return tl.load(cache + offset[:, None] + d, mask=ok_d, other=0.0)
    else:
        N: tl.constexpr = vector.shape[0]
        GROUPS: tl.constexpr = BLOCK // GROUP
        if BITS == 8:
            code = _from_bytes(tl.load(cache + vector[:, None] * D + d, mask=ok_d, other=0))
        else:
            b = tl.arange(0, BLOCK // 2)[None, :]
            at = cache + vector[:, None] * (D // 2) + b
            low, high = _from_halves(tl.load(at, mask=ok[:, None] & (b < D // 2), other=0))
            code = tl.reshape(tl.join(low, high), (N, BLOCK))
        if GROUPS == 1:
            wide = tl.load(scale + vector, mask=ok, other=0.0)[:, None]
        else:
            g = tl.arange(0, GROUPS)[None, :]
            at = scale + vector[:, None] * (D // GROUP) + g
            s = tl.load(at, mask=ok[:, None] & (g < D // GROUP), other=0.0)
            wide = tl.reshape(tl.broadcast_to(s[:, :, None], (N, GROUPS, GROUP)), (N, BLOCK))
        # codes are exact in f16, so the product is rounded once; what is not ok has a scale of 0
        return _as_loaded(code * wide)


@triton.jit
def _codes(parts, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """int32 codes [GROUPS, GROUP] and f16 scales [GROUPS] of f32 [GROUPS, GROUP]."""
    low = tl.min(parts, axis=1)
    high = tl.max(parts, axis=1)
    largest = tl.max(parts.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if BITS == 8:
        far = tl.div_rn(tl.maximum(high, -low), tl.full((GROUPS,), 127.0, tl.float32))
    else:
        far = tl.where(high >= -low, high, low) * -0.125
    s = tl.where(largest >= 0x7F800000, float("nan"), far).to(tl.float16)
    wide = s.to(tl.float32)
    usable = (wide != 0) & (tl.abs(wide) < float("inf"))
    by = tl.broadcast_to(tl.where(usable, wide, 1.0)[:, None], parts.shape)
    ratio = rint(tl.where(usable[:, None], tl.div_rn(parts, by), 0.0))
    if BITS == 8:
        ratio = tl.minimum(tl.maximum(ratio, -127.0), 127.0)
    else:
        ratio = tl.minimum(tl.maximum(ratio + 8.0, 0.0), 15.0)
    return ratio.to(tl.int32), s


@triton.jit
def store_vector(
    y, cache, scale, vector, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """y f32 [BLOCK], 0 from D on, into vector number ``vector`` (int64) of a contiguous cache."""
    i = tl.arange(0, BLOCK)
    if BITS > 8:
        tl.store(cache + vector * D + i, y.to(cache.dtype.element_ty), mask=i < D)
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        code, s = _codes(tl.reshape(y, (GROUPS, GROUP)), BITS, GROUPS)
        g = tl.arange(0, GROUPS)
        tl.store(scale + vector * (D // GROUP) + g, s, mask=g < D // GROUP)
        flat = tl.reshape(code, (BLOCK,))
        if BITS == 8:
            tl.store(cache + vector * D + i, flat.to(tl.int8), mask=i < D)
        else:
            low, high = tl.split(tl.reshape(flat, (BLOCK // 2, 2)))
            b = tl.arange(0, BLOCK // 2)
            byte = (low | (high << 4)).to(tl.uint8)
            tl.store(cache + vector * (D // 2) + b, byte, mask=b < D // 2)
