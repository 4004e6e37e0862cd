# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products with quantized tiles inside Triton programs: contract sections 2 and 3, bit for bit.

Knows no grids and no outputs. A program owns ROWS consecutive matrix rows; tensors are
[8 segments, ROWS], so a lane holds one partial sum of some rows and adds its blocks in ascending
order. Layout of tiles: docs/decisions/003-tiles.md. Layout of activations: kernels/quantize.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from strata.formats.tile_formats import require_format, tile_plan
from strata.kernels.triton_common import (
    SEGMENTS,
    dp4a,
    fma,
    fold8,
    load_words2,
    load_words4,
    opaque_zero,
    pick,
    prmt,
)

# 1.5 * 2^23 as f32 and its bits: bits + D is the f32 1.5 * 2^23 + D for integers |D| < 2^22
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@dataclass(frozen=True)
class TileMatrix:
    """A matrix [n_rows, n_cols] in tiles as kernels see it: all of it known at compile time.

    table: the code table as 4 signed words of 4 entries, or 2 when stored codes are below 8, or ()
    for linear codes. scales, minimums, supers: byte offsets of the planes. The other fields are
    those of ``formats.tile_formats.TileFormat``.
    """

    n_rows: int
    n_cols: int
    tile_rows: int
    bits: int
    mul: int
    bias: int
    table: tuple[int, ...]
    scale: str
    scale_blocks: int
    group: int
    signed: bool
    factor: float
    has_min: bool
    scales: int
    minimums: int
    supers: int


def tile_matrix(type_name: str, n_rows: int, n_cols: int) -> TileMatrix:
    """The record of a matrix of that type.

    UnsupportedError for a type without tiles, FormatError when n_cols is not whole blocks of it.
    """
    form, plan = require_format(type_name), tile_plan(type_name, n_rows, n_cols)
    table: tuple[int, ...] = ()
    if form.table is not None:
        entries = bytes(c & 255 for c in form.table)
        words = 4 if any(entries[8:]) else 2
        table = tuple(
            int.from_bytes(entries[4 * i : 4 * i + 4], "little", signed=True) for i in range(words)
        )
    return TileMatrix(
        n_rows,
        n_cols,
        plan.tile_rows,
        form.bits,
        form.mul,
        form.bias,
        table,
        form.scale,
        form.scale_blocks,
        form.group,
        form.signed,
        form.factor,
        form.has_min,
        plan.scales,
        plan.minimums,
        plan.supers,
    )


@triton.jit
def _plane_at(base, offset, dtype: tl.constexpr):
    """Typed pointer to a plane; planes begin on multiples of 128 bytes of an aligned matrix."""
    # the hint must follow the cast: before it, it compiles to byte loads
    return tl.multiple_of((base + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _load(p, ok, ALL: tl.constexpr):
    """Values at p, 0 where not ok; ALL: everything is ok."""
    if ALL:
        return tl.load(p)
    else:
        return tl.load(p, mask=ok, other=0)


@triton.jit
def _load_f16(plane, index, ok, ALL: tl.constexpr, NARROW: tl.constexpr):
    """f16 number ``index`` of a plane."""
    if NARROW:
        word = _load(plane.to(tl.pointer_type(tl.int32)) + index // 2, ok, ALL)
        bits = (word >> (index % 2 * 16)).to(tl.int16)
        return bits.to(tl.float16, bitcast=True)
    else:
        return _load(plane.to(tl.pointer_type(tl.float16)) + index, ok, ALL)


@triton.jit
def _load_byte(plane, index, ok, SIGNED: tl.constexpr, ALL: tl.constexpr, NARROW: tl.constexpr):
    """Byte number ``index`` of a plane."""
    if NARROW:
        word = _load(plane.to(tl.pointer_type(tl.int32)) + index // 4, ok, ALL)
        byte = word << (24 - index % 4 * 8)
        if SIGNED:
            return byte >> 24
        else:
            return (byte >> 24) & 255
    elif SIGNED:
        return _load(plane.to(tl.pointer_type(tl.int8)) + index, ok, ALL)
    else:
        return _load(plane.to(tl.pointer_type(tl.uint8)) + index, ok, ALL)


@triton.jit
def _stored_scales(
    M: tl.constexpr, plane, tr, rr, blk, ok, ALL: tl.constexpr, NARROW: tl.constexpr
):
    """The stored scales (or minima) of one block a segment: one for each group of the block."""
    NB: tl.constexpr = M.n_cols // 32
    if M.scale == "F16":
        n_units: tl.constexpr = (NB + M.scale_blocks - 1) // M.scale_blocks
        index = (tr * n_units + blk // M.scale_blocks) * 16 + rr
        return (_load_f16(plane, index, ok, ALL, NARROW),)
    else:
        GROUPS: tl.constexpr = 32 // M.group
        stored = ()
        for h in tl.static_range(GROUPS):
            index = ((tr * NB + blk) * GROUPS + h) * 16 + rr
            stored = stored + (_load_byte(plane, index, ok, M.signed, ALL, NARROW),)
        return stored


@triton.jit
def _load_block(
    M: tl.constexpr, base, tr, rr, blk, ok, ALL: tl.constexpr, NARROW: tl.constexpr
):
    """One block of every segment, unconverted: (code words, scales, minima, f16 above them)."""
    NB: tl.constexpr = M.n_cols // 32
    BITS: tl.constexpr = M.bits
    words = ()
    p = _plane_at(base, 0, tl.int32)
    for j in tl.static_range(BITS):
        words = words + (_load(p + ((tr * NB + blk) * BITS + j) * 16 + rr, ok, ALL),)
    plane = _plane_at(base, M.scales, tl.uint8)
    scales = _stored_scales(M, plane, tr, rr, blk, ok, ALL, NARROW)
    minima = ()
    supers = ()
    if M.has_min:
        plane = _plane_at(base, M.minimums, tl.uint8)
        minima = _stored_scales(M, plane, tr, rr, blk, ok, ALL, NARROW)
    if M.scale == "SUPER":
        n: tl.constexpr = M.n_cols // 256
        plane = _plane_at(base, M.supers, tl.uint8)
        index = (tr * n + blk // 8) * 16 + rr
        supers = supers + (_load_f16(plane, index, ok, ALL, NARROW),)
        if M.has_min:
            index += n * M.tile_rows * 16
            supers = supers + (_load_f16(plane, index, ok, ALL, NARROW),)
    return words, scales, minima, supers


@triton.jit
def _look_up(M: tl.constexpr, word):
    """Table entries of the 8 nibbles of a word: (of the low nibbles, of the high nibbles)."""
    t0 = tl.full(word.shape, M.table[0], tl.int32)
    t1 = tl.full(word.shape, M.table[1], tl.int32)
    if len(M.table) == 2:
        a = prmt(t0, t1, word)
        b = prmt(t0, t1, word >> 16)
    else:
        t2 = tl.full(word.shape, M.table[2], tl.int32)
        t3 = tl.full(word.shape, M.table[3], tl.int32)
        low = word & 0x77777777
        # per nibble: byte i of the lower half of the table, or of the upper half
        half = ((word >> 1) & 0x44444444) | 0x32103210
        a = prmt(prmt(t0, t1, low), prmt(t2, t3, low), half)
        low = low >> 16
        b = prmt(prmt(t0, t1, low), prmt(t2, t3, low), half >> 16)
    even = tl.full(word.shape, 0x6420, tl.int32)
    odd = tl.full(word.shape, 0x7531, tl.int32)
    return prmt(a, b, even), prmt(a, b, odd)


@triton.jit
def _codes(M: tl.constexpr, words):
    """Eight words of four signed bytes, k ascending: codes c, or u where c = mul * u - bias."""
    BITS: tl.constexpr = M.bits
    FIELDS: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = 0x0F0F0F0F if BITS == 4 else 0x03030303
    codes = ()
    for j in tl.static_range(BITS):
        if BITS == 8:
            codes = codes + (words[j] ^ -2139062144,)  # 0x80808080: u - 128 in every byte
        elif len(M.table) > 0:
            codes = codes + _look_up(M, words[j])
        else:
            for s in tl.static_range(FIELDS):
                codes = codes + ((words[j] >> (BITS * s)) & MASK,)
    return codes


@triton.jit
def _scale_values(M: tl.constexpr, stored, d):
    """Stored scales (or minima) of a block as f32, exact; d: (f16 above them,) or ()."""
    values = ()
    for h in tl.static_range(len(stored)):
        x = stored[h]
        if M.scale == "F16":
            y = x.to(tl.float32)
        elif M.scale == "SUPER":
            y = (d[0].to(tl.float32) * M.factor) * x.to(tl.float32)
        elif M.scale == "E8M0":
            e = x.to(tl.int32)
            y = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(tl.float32, bitcast=True)
        else:
            e = x.to(tl.int32)
            normal = ((e & 127) + 952) << 20  # exponent field e + 119, mantissa bits below
            tiny = (e & 7).to(tl.float32) * 0.0009765625
            y = tl.where((e & 120) == 0, tiny, normal.to(tl.float32, bitcast=True))
        values = values + (y,)
    return values


@triton.jit
def _load_x(q, meta, slot):
    """One block of one token a segment: (8 words of q, scale, sums of both halves)."""
    low = load_words4(q.to(tl.int64) + slot * 32)
    high = load_words4(q.to(tl.int64) + slot * 32 + 16)
    scale, sums = load_words2(meta.to(tl.int64) + slot * 8)
    return low + high, scale.to(tl.float32, bitcast=True), (sums << 16) >> 16, sums >> 16


@triton.jit
def _add_block(M: tl.constexpr, codes, scales, minima, x, p):
    """Contract 3: the partial sums p [8, ROWS] plus one block of every segment."""
    words, sx, sum0, sum1 = x
    GROUPS: tl.constexpr = len(scales)
    WORDS: tl.constexpr = 8 // GROUPS
    for h in tl.static_range(GROUPS):
        if GROUPS == 1:
            total = sum0 + sum1
        elif h == 0:
            total = sum0
        else:
            total = sum1
        if M.mul == 1 and M.bits < 8 and M.bias != 0:
            dot = _MAGIC_BITS - M.bias * total
        else:
            dot = tl.zeros_like(total) + _MAGIC_BITS
        for j in tl.static_range(WORDS):
            dot = dp4a(codes[h * WORDS + j], words[h * WORDS + j], dot)
        f = dot.to(tl.float32, bitcast=True) - _MAGIC
        if M.mul > 1:
            # integers below 2^24: exact
            f = f * M.mul - (M.bias * total).to(tl.float32)
        p = fma(f, sx * scales[h], p)
        if M.has_min:
            p = fma(total.to(tl.float32), -(sx * minima[h]), p)
    return p


@triton.jit
def _add_matrix(
    M: tl.constexpr, base, row, i, xs, acc, ROWS: tl.constexpr, NARROW: tl.constexpr
):
    """Block i of every segment of one matrix added to the partial sums of every token."""
    NB: tl.constexpr = M.n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    FULL: tl.constexpr = NB % 8 == 0
    ROWS_OK: tl.constexpr = M.tile_rows * 16 % ROWS == 0
    blk = tl.arange(0, SEGMENTS)[:, None] * L + i
    ok = blk < NB
    if not ROWS_OK:
        ok = ok & (row < M.tile_rows * 16)
    block = _load_block(M, base, row // 16, row % 16, blk, ok, FULL and ROWS_OK, NARROW)
    words, scales, minima, supers = block
    codes = _codes(M, words)
    scales = _scale_values(M, scales, supers)
    if M.has_min:
        minima = _scale_values(M, minima, supers[1:])
    new = ()
    for t in tl.static_range(len(xs)):
        p = _add_block(M, codes, scales, minima, xs[t], acc[t])
        if not FULL:
            p = tl.where(blk < NB, p, acc[t])  # even adding +0 would change a partial sum of -0
        new = new + (p,)
    return new


@triton.jit
def tile_products(
    MS: tl.constexpr, bases, first_row, q, meta,
    ROWS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Rows first_row .. + ROWS - 1 of matrices in tiles times some tokens.

    MS: TileMatrix of each matrix, all with the same n_cols. bases: their int64 addresses, multiples
    of 16. q, meta: pointers of each token (kernels/quantize). STAGES: blocks of a segment in
    flight. NARROW: a thread has fewer than four rows. Returns a tuple of f32 [ROWS]: token t of matrix m at m * tokens + t. Rows from
    16 * tile_rows on are not read; their results mean nothing.
    """
    T: tl.constexpr = len(q)
    COUNT: tl.constexpr = len(bases)
    NB: tl.constexpr = pick(MS, 0).n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    row = (first_row + tl.arange(0, ROWS))[None, :]
    acc = ()
    for n in tl.static_range(COUNT * T):
        acc = acc + (tl.zeros((SEGMENTS, ROWS), tl.float32),)
    # the pipeliner turns the loads of the matrices into asynchronous copies STAGES - 1 blocks
    # ahead; plain loads would be moved down to their uses. An open count keeps the code short.
    for i in tl.range(0, L + opaque_zero(), num_stages=STAGES):
        slot = tl.arange(0, SEGMENTS)[:, None] + i * SEGMENTS
        xs = ()
        for t in tl.static_range(T):
            xs = xs + (_load_x(q[t], meta[t], slot),)
        new = ()
        for m in tl.static_range(COUNT):
            own = acc[m * T : m * T + T]
            new = new + _add_matrix(pick(MS, m), bases[m], row, i, xs, own, ROWS, NARROW)
        acc = new
    y = ()
    for n in tl.static_range(COUNT * T):
        y = y + (fold8(acc[n], ROWS),)
    return y
