# mypy: allow-untyped-defs, allow-untyped-decorators
"""Products with quantized tiles inside Triton programs: contract sections 2 and 3, bit for bit.

Knows no grids and no outputs. A program owns ROWS consecutive matrix rows; tensors are
[8 segments, ROWS], so a lane holds one partial sum of some rows and adds its blocks in ascending
order. Layout of tiles: docs/decisions/003-tiles.md. Layout of activations: kernels/quantize.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.triton_common import (
    SEGMENTS,
    dp4a,
    dp4a_unsigned,
    fma,
    fold8,
    load_words2,
    load_words2_now,
    load_words4,
    load_words4_now,
    opaque_zero,
    pick,
    prmt,
    tuple_of,
    twin_lanes,
    twins_apart,
)

# 1.5 * 2^23 as f32 and its bits: bits + D is the f32 1.5 * 2^23 + D for integers |D| < 2^22
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def plane_at(base, offset, dtype: tl.constexpr):
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
def stored_scales(
    M: tl.constexpr, plane, tr, rr, lift, blk, ok, ALL: tl.constexpr, NARROW: tl.constexpr
):
    """The stored scales (or minima) of one block a segment: one for each group of the block."""
    NB: tl.constexpr = M.n_cols // 32
    if M.scale == "F16":
        n_units: tl.constexpr = (NB + M.scale_blocks - 1) // M.scale_blocks
        index = (tr * n_units + blk // M.scale_blocks) * 16 + rr + lift * 2
        return (_load_f16(plane, index, ok, ALL, NARROW),)
    else:
        GROUPS: tl.constexpr = 32 // M.group
        stored = ()
        for h in tl.static_range(GROUPS):
            index = ((tr * NB + blk) * GROUPS + h) * 16 + rr + lift * 4
            stored = stored + (_load_byte(plane, index, ok, M.signed, ALL, NARROW),)
        return stored


@triton.jit
def super_scales(
    M: tl.constexpr, base, tr, rr, lift, blk, ok, ALL: tl.constexpr, NARROW: tl.constexpr
):
    """The f16 numbers above the scales (and minima) of one block a segment, or ()."""
    supers = ()
    if M.scale == "SUPER":
        n: tl.constexpr = M.n_cols // 256
        plane = plane_at(base, M.supers, tl.uint8)
        index = (tr * n + blk // 8) * 16 + rr + lift * 2
        supers = supers + (_load_f16(plane, index, ok, ALL, NARROW),)
        if M.has_min:
            index = index + n * M.tile_rows * 16
            supers = supers + (_load_f16(plane, index, ok, ALL, NARROW),)
    return supers


@triton.jit
def load_block(
    M: tl.constexpr, base, tr, rr, lift, blk, ok, ALL: tl.constexpr, NARROW: tl.constexpr
):
    """One block of every segment, unconverted: (code words, scales, minima, f16 above them).

    lift: 32-bit words from ``base`` to the matrix that a row belongs to.
    """
    NB: tl.constexpr = M.n_cols // 32
    BITS: tl.constexpr = M.bits
    words = ()
    p = plane_at(base, 0, tl.int32)
    for j in tl.static_range(BITS):
        words = words + (_load(p + (((tr * NB + blk) * BITS + j) * 16 + rr + lift), ok, ALL),)
    plane = plane_at(base, M.scales, tl.uint8)
    scales = stored_scales(M, plane, tr, rr, lift, blk, ok, ALL, NARROW)
    minima = ()
    if M.has_min:
        plane = plane_at(base, M.minimums, tl.uint8)
        minima = stored_scales(M, plane, tr, rr, lift, blk, ok, ALL, NARROW)
    supers = super_scales(M, base, tr, rr, lift, blk, ok, ALL, NARROW)
    return words, scales, minima, supers


@triton.jit
def code_table(M: tl.constexpr):
    """The words of the code table, kept in registers: known ones would be made anew at each use."""
    WORDS: tl.constexpr = len(M.table)
    words = ()
    for i in tl.static_range(WORDS):
        words = words + (opaque_zero() + M.table[i],)
    return words


@triton.jit
def look_up(table, word, LIFTED: tl.constexpr):
    """Table entries of the 8 nibbles of a word: (of the low nibbles, of the high nibbles)."""
    if len(table) == 2:
        a = prmt(table[0], table[1], word)
        b = prmt(table[0], table[1], word >> 16)
    elif LIFTED:
        # a nibble with its top bit set selects the sign of an entry, which is 0
        other = word ^ -2004318072  # 0x88888888
        a = prmt(table[0], table[1], word) | prmt(table[2], table[3], other)
        word, other = word >> 16, other >> 16
        b = prmt(table[0], table[1], word) | prmt(table[2], table[3], other)
    else:
        low = word & 0x77777777
        # per nibble: byte i of the lower half of the table, or of the upper half
        half = ((word >> 1) & 0x44444444) | 0x32103210
        a = prmt(prmt(table[0], table[1], low), prmt(table[2], table[3], low), half)
        low = low >> 16
        b = prmt(prmt(table[0], table[1], low), prmt(table[2], table[3], low), half >> 16)
    even = tl.full(word.shape, 0x6420, tl.int32)
    odd = tl.full(word.shape, 0x7531, tl.int32)
    return prmt(a, b, even), prmt(a, b, odd)


@triton.jit
def block_codes(M: tl.constexpr, table, words):
    """Eight words of four bytes v, k ascending; c = mul * v - bias. 8 bits: v are unsigned."""
    BITS: tl.constexpr = M.bits
    FIELDS: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = 0x0F0F0F0F if BITS == 4 else 0x03030303
    codes = ()
    for j in tl.static_range(BITS):
        if BITS == 8:
            codes = codes + (words[j],)
        elif len(table) > 0:
            codes = codes + look_up(table, words[j], M.lifted)
        else:
            for s in tl.static_range(FIELDS):
                codes = codes + ((words[j] >> (BITS * s)) & MASK,)
    return codes


@triton.jit
def scale_values(M: tl.constexpr, stored, d):
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
def load_x(q, meta, slot, NOW: tl.constexpr = False):
    """One block of one token a segment: (8 words of q, scale, sums of both halves)."""
    if NOW:
        low = load_words4_now(q.to(tl.int64) + slot * 32)
        high = load_words4_now(q.to(tl.int64) + slot * 32 + 16)
        scale, sums = load_words2_now(meta.to(tl.int64) + slot * 8)
    else:
        low = load_words4(q.to(tl.int64) + slot * 32)
        high = load_words4(q.to(tl.int64) + slot * 32 + 16)
        scale, sums = load_words2(meta.to(tl.int64) + slot * 8)
    return low + high, scale.to(tl.float32, bitcast=True), (sums << 16) >> 16, sums >> 16


@triton.jit
def block_terms(M: tl.constexpr, codes, scales, minima, x):
    """What one block adds: a flat tuple of pairs (a, b), each for p = fma(a, b, p), in order."""
    words, sx, sum0, sum1 = x
    GROUPS: tl.constexpr = len(scales)
    WORDS: tl.constexpr = 8 // GROUPS
    terms = ()
    for h in tl.static_range(GROUPS):
        if GROUPS == 1:
            total = sum0 + sum1
        elif h == 0:
            total = sum0
        else:
            total = sum1
        if M.mul == 1 and M.bias != 0:
            dot = _MAGIC_BITS - M.bias * total
        else:
            dot = tl.zeros_like(total) + _MAGIC_BITS
        for j in tl.static_range(WORDS):
            if M.bits == 8:
                dot = dp4a_unsigned(codes[h * WORDS + j], words[h * WORDS + j], dot)
            else:
                dot = dp4a(codes[h * WORDS + j], words[h * WORDS + j], dot)
        f = dot.to(tl.float32, bitcast=True) - _MAGIC
        if M.mul > 1:
            # integers below 2^24: exact
            f = f * M.mul - (M.bias * total).to(tl.float32)
        terms = terms + (f, sx * scales[h])
        if M.has_min:
            terms = terms + (total.to(tl.float32), -(sx * minima[h]))
    return terms


@triton.jit
def _add_block(M: tl.constexpr, codes, scales, minima, x, p):
    """Contract 3: the partial sums p [8, ROWS] plus one block of every segment."""
    terms = block_terms(M, codes, scales, minima, x)
    PAIRS: tl.constexpr = len(terms) // 2
    for i in tl.static_range(PAIRS):
        p = fma(terms[2 * i], terms[2 * i + 1], p)
    return p


@triton.jit
def _add_matrix(
    M: tl.constexpr, table, base, tr, rr, lift, i, xs, acc,
    ROWS_OK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Block i of every segment of one matrix added to the partial sums of every token."""
    NB: tl.constexpr = M.n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    FULL: tl.constexpr = NB % 8 == 0
    ALL: tl.constexpr = FULL and ROWS_OK
    blk = tl.arange(0, SEGMENTS)[:, None] * L + i
    ok = blk < NB
    if not ROWS_OK:
        ok = ok & (tr < M.tile_rows)
    block = load_block(M, base, tr, rr, lift, blk, ok, ALL, NARROW)
    return add_loaded(M, table, block, xs, acc, blk < NB, FULL)


@triton.jit
def add_loaded(M: tl.constexpr, table, block, xs, acc, ok, ALL: tl.constexpr):
    """A loaded block of every segment added to the partial sums of every token, where it is ok."""
    words, scales, minima, supers = block
    codes = block_codes(M, table, words)
    scales = scale_values(M, scales, supers)
    if M.has_min:
        minima = scale_values(M, minima, supers[1:])
    new = ()
    for t in tl.static_range(len(xs)):
        p = _add_block(M, codes, scales, minima, xs[t], acc[t])
        if not ALL:
            p = tl.where(ok, p, acc[t])  # even adding +0 would change a partial sum of -0
        new = new + (p,)
    return new


@triton.jit
def load_xs(q, meta, i, NOW: tl.constexpr = False):
    """Block i of every segment of every token."""
    slot = tl.arange(0, SEGMENTS)[:, None] + i * SEGMENTS
    xs = ()
    for t in tl.static_range(len(q)):
        xs = xs + (load_x(q[t], meta[t], slot, NOW),)
    return xs


@triton.jit
def _sum_blocks(
    MS: tl.constexpr, bases, tr, rr, lift, q, meta, LANES: tl.constexpr, STAGES: tl.constexpr,
    ROWS_OK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Some rows of every matrix times every token: a tuple of f32 [LANES].

    tr, rr: tile row and row in the tile of every lane, [1, LANES].
    """
    T: tl.constexpr = len(q)
    COUNT: tl.constexpr = len(bases)
    NB: tl.constexpr = pick(MS, 0).n_cols // 32
    L: tl.constexpr = (NB + SEGMENTS - 1) // SEGMENTS
    acc = ()
    for _ in tl.static_range(COUNT * T):
        acc = acc + (tl.zeros((SEGMENTS, LANES), tl.float32),)
    tables = ()
    for m in tl.static_range(COUNT):
        tables = tables + (code_table(pick(MS, m)),)
    xs = load_xs(q, meta, 0)
    # the pipeliner turns the loads of the matrices into asynchronous copies STAGES - 1 blocks
    # ahead; plain loads would be moved down to their uses. An open count keeps the code short.
    for i in tl.range(0, L + opaque_zero(), num_stages=STAGES):
        # a block's activations are loaded while the one before is added (27 us become 16 with one
        # token, 320 rows of 10240 on an H200)
        later = load_xs(q, meta, tl.minimum(i + 1, L - 1), True)
        new = ()
        for m in tl.static_range(COUNT):
            own = acc[m * T : m * T + T]
            new = new + _add_matrix(
                pick(MS, m), tables[m], bases[m], tr, rr, lift, i, xs, own, ROWS_OK, NARROW
            )
        acc = new
        xs = later
    y = ()
    for n in tl.static_range(COUNT * T):
        y = y + (fold8(acc[n], LANES),)
    return y


@triton.jit
def tile_products(
    MS: tl.constexpr, bases, first_row, q, meta,
    ROWS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Rows first_row .. first_row + ROWS - 1 of matrices in tiles times some tokens.

    MS: TileMatrix (kernels/gpu_matrix) of each matrix, all of one shape. bases: their int64
    addresses, multiples of 16. q, meta: pointers of each token (kernels/quantize). STAGES: blocks
    of a segment in flight. NARROW: a thread has fewer than four rows. Returns a tuple of f32
    [ROWS]: token t of matrix m at m * tokens + t. Rows from 16 * tile_rows on are not read; their
    results mean nothing.
    """
    ROWS_OK: tl.constexpr = pick(MS, 0).tile_rows * 16 % ROWS == 0
    row = (first_row + tl.arange(0, ROWS))[None, :]
    return _sum_blocks(MS, bases, row // 16, row % 16, 0, q, meta, ROWS, STAGES, ROWS_OK, NARROW)


@triton.jit
def twin_products(
    M: tl.constexpr, base, lift, first_row, q, meta,
    ROWS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """``tile_products`` of two matrices of one type, side by side in the threads.

    first_row, ROWS: multiples of 16. lift: 32-bit words from the first matrix to the second, a
    multiple of 4. Each thread works on one of the two, so the program can have twice the warps.
    """
    ROWS_OK: tl.constexpr = M.tile_rows * 16 % ROWS == 0
    LANES: tl.constexpr = 2 * ROWS
    tr, rr, lift = twin_lanes(first_row, lift, ROWS)
    both = _sum_blocks(tuple_of(M), (base,), tr, rr, lift, q, meta, LANES, STAGES, ROWS_OK, NARROW)
    return twins_apart(both, ROWS)
