# mypy: allow-untyped-defs, allow-untyped-decorators
"""Table rows by id on the GPU, decoded to f32, once or for every residual stream.

Tables are float rows or tiles (kernels/gpu_weight); a value has the bits of the NumPy decoder:
code * scale, minus the minimum, two roundings, times the tensor's scale where it has one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from strata.formats.tile_formats import require_format, tile_plan
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.triton_common import EXACT

_BLOCK = 512
"""Columns of one program."""


@triton.jit
def _scale_of(
    plane, supers, r, tile, k, ok, K: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr,
    SIGNED: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Scale (or minimum) of columns k of row r of a tile. SPAN: columns of one stored scale."""
    UNITS: tl.constexpr = (K + SPAN - 1) // SPAN
    at = (tile * UNITS + k // SPAN) * 16 + r
    if KIND == "F16":
        p = plane.to(tl.pointer_type(tl.float16), bitcast=True)
        return tl.load(p + at, mask=ok, other=0.0).to(tl.float32)
    else:
        stored = tl.load(plane + at, mask=ok, other=0)
        if KIND == "SUPER":
            p = supers.to(tl.pointer_type(tl.float16), bitcast=True)
            d = tl.load(p + (tile * (K // 256) + k // 256) * 16 + r, mask=ok, other=0.0)
            small = stored.to(tl.int8, bitcast=True) if SIGNED else stored
            return (d.to(tl.float32) * FACTOR) * small.to(tl.float32)
        elif KIND == "E8M0":
            e = stored.to(tl.int32)
            bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)
            return bits.to(tl.float32, bitcast=True)
        else:
            e = stored.to(tl.int32)
            normal = (((e & 127) + 952) << 20).to(tl.float32, bitcast=True)
            return tl.where((e & 120) == 0, (e & 7).to(tl.float32) * 0.0009765625, normal)


@triton.jit
def tile_rows_kernel(
    ids, data, table, out, scale, OFFSET_S, OFFSET_M, OFFSET_D, OFFSET_DM,
    K: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr,
    SIGNED: tl.constexpr, FACTOR: tl.constexpr, HAS_MIN: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p): BLOCK columns of the row of token t. table: the code of every stored u."""
    FIELDS: tl.constexpr = 8 // BITS
    t = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = k < K
    row = tl.load(ids + t).to(tl.int64)
    tile, r = row // 16, row % 16
    in_block = k % 32
    word = in_block // (4 * FIELDS)
    field = (in_block % (4 * FIELDS)) // 4
    at = (((tile * (K // 32) + k // 32) * BITS + word) * 16 + r) * 4 + k % 4
    byte = tl.load(data + at, mask=ok, other=0).to(tl.int32)
    u = (byte >> (field * BITS)) & ((1 << BITS) - 1)
    code = tl.load(table + u, mask=ok, other=0).to(tl.float32)
    s = _scale_of(data + OFFSET_S, data + OFFSET_D, r, tile, k, ok, K, KIND, SPAN, SIGNED, FACTOR)
    y = code * s
    if HAS_MIN:
        y -= _scale_of(
            data + OFFSET_M, data + OFFSET_DM, r, tile, k, ok, K, KIND, SPAN, False, FACTOR
        )
    if SCALED:
        y = y * scale
    for c in tl.static_range(C):
        tl.store(out + (t * C + c) * K + k, y, mask=ok)


@triton.jit
def float_rows_kernel(
    ids, data, out, scale, K: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p): BLOCK columns of the row of token t."""
    t = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = k < K
    row = tl.load(ids + t).to(tl.int64)
    if data.dtype.element_ty == tl.bfloat16:
        # by bits: the interpreter's conversion is not exact for every number
        p = data.to(tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.load(p + row * K + k, mask=ok, other=0).to(tl.int32) << 16
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = tl.load(data + row * K + k, mask=ok, other=0.0).to(tl.float32)
    if SCALED:
        y = y * scale
    for c in tl.static_range(C):
        tl.store(out + (t * C + c) * K + k, y, mask=ok)


@lru_cache(maxsize=64)
def _code_table(type_name: str, device: torch.device) -> torch.Tensor:
    """The code of every stored u, int8 [2^bits] on the device."""
    return torch.from_numpy(require_format(type_name).code_table().copy()).to(device)


def lookup(table: GpuWeight, ids_T: torch.Tensor, out: torch.Tensor) -> None:
    """Row ids[t] of the table into out f32 [T, D], or into every stream of [T, C, D]. One launch.

    ids_T: int32 or int64 [T] on the device, inside the table. out is contiguous. Call once before
    recording: the small table of codes is copied to the device then.
    """
    n_tokens, width = len(ids_T), table.n_cols
    streams = out.numel() // (n_tokens * width)
    assert out.is_contiguous() and out.shape[-1] == width, (tuple(out.shape), width)
    grid = (n_tokens, triton.cdiv(width, _BLOCK))
    shared = {"K": width, "C": streams, "SCALED": table.scale != 1.0, "BLOCK": _BLOCK}
    if not table.is_tiles:
        float_rows_kernel[grid](ids_T, table.data, out, table.scale, **shared, num_warps=4, **EXACT)
        return
    form, plan = require_format(table.type), tile_plan(table.type, table.n_rows, width)
    super_bytes = 2 * plan.tile_rows * 16 * (width // 256)
    tile_rows_kernel[grid](
        ids_T, table.data, _code_table(table.type, table.data.device), out, table.scale,
        plan.scales, max(plan.minimums, 0), max(plan.supers, 0),
        max(plan.supers, 0) + super_bytes, BITS=form.bits, KIND=form.scale,
        SPAN=32 * form.scale_blocks if form.scale == "F16" else form.group, SIGNED=form.signed,
        FACTOR=form.factor, HAS_MIN=form.has_min, **shared, num_warps=4, **EXACT,
    )  # fmt: skip
