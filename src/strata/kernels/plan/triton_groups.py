# mypy: allow-untyped-defs, allow-untyped-decorators
"""Places and groups of a layer's rows as device functions of one warp: ``plan/triton.py``.

Rows with the same expert are never compared with each other. One token has no expert twice. Of
several tokens each writes what it has to say of an expert into that expert's own eight bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.core.types import Place
from strata.kernels.words.triton import announce

_FAST, _PCIE = tl.constexpr(int(Place.FAST)), tl.constexpr(int(Place.PCIE))
_CPU, _LATE = tl.constexpr(int(Place.CPU)), tl.constexpr(int(Place.CPU_LATE))
_SKIPPED = tl.constexpr(int(Place.SKIPPED))
_LOW_BITS = tl.constexpr(0x7F7F7F7F7F7F7F7F)
_ONES = tl.constexpr(0x0101010101010101)
_HEAVY = tl.constexpr(-0x7F7F7F7F7F7F7F80)
"""Bit 7 of every byte."""
_KEPT = tl.constexpr(0x4040404040404040)


@triton.jit
def _nonzero_bytes(m):
    """How many of the eight bytes are not 0."""
    ones = ((((m & _LOW_BITS) + _LOW_BITS) | m) >> 7) & _ONES
    return ((ones * _ONES) >> 56).to(tl.int32) & 15


@triton.jit
def _place(fast, far, before, n_missed, i, moved, heavy, kept):
    """Place of each row. before: experts missed before its own."""
    n_moved = tl.sum(tl.where(i == n_missed - 1, moved, 0), axis=0)
    pcie = (far != 0) & (before >= n_missed - n_moved)
    code = tl.where(heavy != 0, _CPU, _LATE)
    code = tl.where(pcie, _PCIE, code)
    code = tl.where(kept != 0, code, _SKIPPED)
    return tl.where(fast, _FAST, code)


@triton.jit
def _field(packed, place):
    """The eight bits of a place."""
    return ((packed >> (place * 8)) & 255).to(tl.int32)


@triton.jit
def _store_starts(start, i, group, entry, lead, n_groups, n_rows, R: tl.constexpr):
    """First entries of the groups; all starts behind the last group are the end."""
    tl.store(start + group, entry, mask=lead)
    tl.store(start + i, i * 0 + n_rows, mask=(i >= n_groups) & (i < R))
    tl.store(start + n_groups, n_rows)
    tl.store(start + R, n_rows)


@triton.jit
def _for_host(
    i, expert, row, token, group, entry, mine, lead, groups, rows, late_groups, late_rows, counts,
    ints, word, value, R: tl.constexpr, RINGS: tl.constexpr,
):  # fmt: skip
    """Payload (kernels/words) and counts, and the ring."""
    n_groups = groups + late_groups
    four = tl.where(i == 0, groups, rows)
    four = tl.where(i == 2, late_groups, four)
    four = tl.where(i == 3, late_rows, four)
    if n_groups > 0:
        to = tl.multiple_of(ints.to(tl.pointer_type(tl.int32)), 16)
        tl.store(to + i, four, mask=i < 4)
        tl.store(to + 4 + group, expert, mask=mine & lead)
        starts = to + 4 + R
        _store_starts(starts, i, group, entry, mine & lead, n_groups, rows + late_rows, R)
        tl.store(to + 5 + 2 * R + entry, row, mask=mine)
        tl.store(to + 5 + 3 * R + entry, token, mask=mine)
        if RINGS:
            tl.debug_barrier()
            announce(word, value)
    tl.store(counts + i, four, mask=i < 4)
    tl.store(counts + 4, n_groups)


@triton.jit
def _for_device(
    i, row, token, group, entry, address, mine, lead, n_groups, n_rows, g_addr, g_start, g_row,
    g_token, g_count, R: tl.constexpr,
):  # fmt: skip
    tl.store(g_addr + group, address, mask=mine & lead)
    _store_starts(g_start, i, group, entry, mine & lead, n_groups, n_rows, R)
    tl.store(g_row + entry, row, mask=mine)
    tl.store(g_token + entry, token, mask=mine)
    tl.store(g_count, n_groups)


@triton.jit
def plan_one(
    e, heavy, kept, vram, host, moved, place, g_addr, g_start, g_row, g_token, g_count, counts,
    ints, word, value, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, HOST: tl.constexpr,
    RINGS: tl.constexpr,
):  # fmt: skip
    """One token: a group for every row. R: rows of the payload's layout."""
    k = tl.arange(0, KP)
    ok = k < K
    addr = tl.load(vram + e, mask=ok, other=0)
    far = tl.load(host + e, mask=ok, other=0)
    fast = addr != 0
    missed = (ok & (fast == 0) & (kept != 0)).to(tl.int32)
    before = tl.cumsum(missed, 0) - missed
    code = _place(fast, far, before, tl.sum(missed, axis=0), k, moved, heavy, kept)
    tl.store(place + k, code.to(tl.int8), mask=ok)
    # how many rows of each place, eight bits each
    one = tl.where(ok & (code < _SKIPPED), (k * 0 + 1) << (code * 8), 0)
    count = tl.sum(one, axis=0)
    entry = _field(tl.cumsum(one, 0) - one, code)
    n_fast, n_time, n_late = _field(count, _FAST), _field(count, _CPU), _field(count, _LATE)
    entry += tl.where(code == _PCIE, n_fast, 0) + tl.where(code == _LATE, n_time, 0)
    if HOST:
        mine = ok & ((code == _CPU) | (code == _LATE))
        _for_host(
            k, e, k, k * 0, entry, entry, mine, ok, n_time, n_time, n_late, n_late, counts, ints,
            word, value, R, RINGS,
        )  # fmt: skip
    n_gpu = n_fast + _field(count, _PCIE)
    _for_device(
        k, k, k * 0, entry, entry, tl.where(fast, addr, far), ok & (code <= _PCIE), ok, n_gpu,
        n_gpu, g_addr, g_start, g_row, g_token, g_count, K,
    )  # fmt: skip


@triton.jit
def say(e, heavy, kept, t, table, K: tl.constexpr, KP: tl.constexpr):
    """Byte t of an expert's number, all 0 before: bit 7 heavy, bit 6 kept, and the rank + 1."""
    k = tl.arange(0, KP)
    said = ((heavy << 7) | (kept << 6) | (k + 1)).to(tl.int64) << (8 * t).to(tl.int64)
    tl.atomic_or(table + e, said, mask=k < K, sem="relaxed")


@triton.jit
def plan_all(
    expert, table, vram, host, moved, place, g_addr, g_start, g_row, g_token, g_count, counts,
    ints, word, value, T: tl.constexpr, K: tl.constexpr, T2: tl.constexpr, K2: tl.constexpr,
    R: tl.constexpr, HOST: tl.constexpr, RINGS: tl.constexpr,
):  # fmt: skip
    """All tokens, when each has said what it has to; the numbers are 0 again afterwards."""
    N: tl.constexpr = max(T2 * K2, 32)
    i = tl.arange(0, N)
    token, rank = i // K2, i % K2
    ok = (token < T) & (rank < K)
    row = token * K + rank
    moved_i = tl.load(moved + i, mask=i < T * K, other=0)
    e = tl.load(expert + row, mask=ok, other=0)
    said = tl.load(table + e, mask=ok, other=0)
    addr = tl.load(vram + e, mask=ok, other=0)
    far = tl.load(host + e, mask=ok, other=0)
    # rows of earlier tokens stand before mine; the first one's row leads the group
    one64 = tl.full((N,), 1, tl.int64)
    within = _nonzero_bytes(said & ((one64 << (token * 8).to(tl.int64)) - 1))
    lead = ok & (within == 0)
    lowest = said & (-said)
    at = tl.zeros((N,), tl.int32)
    for b in tl.static_range(1, T):
        at += (lowest >= (one64 << (8 * b))).to(tl.int32)
    leader = at * K2 + ((said >> (at * 8).to(tl.int64)) & 63).to(tl.int32) - 1
    leader = tl.where(ok, leader, i)
    fast = addr != 0
    kept = (said & _KEPT) != 0
    missed = (lead & (fast == 0) & kept).to(tl.int32)
    before = tl.gather(tl.cumsum(missed, 0) - missed, leader, 0)
    n_missed = tl.sum(missed, axis=0)
    code = _place(fast, far, before, n_missed, i, moved_i, (said & _HEAVY) != 0, kept)
    tl.store(place + row, code.to(tl.int8), mask=ok)
    # rows of each place, eight bits each, and above them its groups
    both = (_nonzero_bytes(said).to(tl.int64) | (one64 << 32)) << (code * 8).to(tl.int64)
    both = tl.where(lead & (code < _SKIPPED), both, 0)
    count = tl.sum(both, axis=0)
    mine = tl.gather(tl.cumsum(both, 0) - both, leader, 0)
    wide = code.to(tl.int64)
    entry, group = _field(mine, wide) + within, _field(mine >> 32, wide)
    rows, groups = _field(count, _CPU), _field(count >> 32, _CPU)
    gpu_rows, gpu_groups = _field(count, _FAST), _field(count >> 32, _FAST)
    entry += tl.where(code == _PCIE, gpu_rows, 0) + tl.where(code == _LATE, rows, 0)
    group += tl.where(code == _PCIE, gpu_groups, 0) + tl.where(code == _LATE, groups, 0)
    if HOST:
        _for_host(
            i, e, row, token, group, entry, ok & ((code == _CPU) | (code == _LATE)), lead, groups,
            rows, _field(count >> 32, _LATE), _field(count, _LATE), counts, ints, word, value, R,
            RINGS,
        )  # fmt: skip
    _for_device(
        i, row, token, group, entry, tl.where(fast, addr, far), ok & (code <= _PCIE), lead,
        gpu_groups + _field(count >> 32, _PCIE), gpu_rows + _field(count, _PCIE), g_addr, g_start,
        g_row, g_token, g_count, T * K,
    )  # fmt: skip
    tl.store(table + e, one64 * 0, mask=ok)
