# mypy: allow-untyped-defs, allow-untyped-decorators
"""Experts of a window that lie in RAM are copied over the link before they are multiplied.

A product reads tiles in pieces of 64 bytes, and the link carries those at two thirds of its speed
(35 of 50 GB/s on PCIe 5). Here every warp asks for 512 bytes at once. What gate and up need of all
experts goes first, and is told by a counter, so that they are multiplied while the rest is on its
way. Bits are copied, so nothing else changes. Knows no products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from strata.kernels.expert_rows.launch import GpuGroups

PROGRAMS = 33
"""A quarter of an H200's processors keeps the link busy; more are slower for one expert."""
_WORDS = 2048
"""32-bit words of a turn: with 4 warps 4 loads of 16 bytes in flight a thread."""


@dataclass(frozen=True)
class Stage:
    """Where experts are copied to.

    memory: uint8 [slots, bytes], rows on multiples of 16. vram_2: int64 [2], begin and end of the
    addresses that are device memory already. arrived: int32 [1], 0 between windows.
    """

    memory: torch.Tensor
    vram_2: torch.Tensor
    arrived: torch.Tensor


@triton.jit
def fetch_kernel(
    addr, n_groups, vram, stage, addr_out, arrived, P,
    HEAD: tl.constexpr, WORDS: tl.constexpr, STRIDE: tl.constexpr, SLOTS: tl.constexpr,
    MOST: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p of P: blocks p, p + P, .. of the heads of all experts, then of the rests."""
    p = tl.program_id(0)
    i = tl.arange(0, GROUPS)
    n = tl.load(n_groups)
    low = tl.load(vram)
    high = tl.load(vram + 1)
    all_addr = tl.load(addr + i, mask=(i < n) & (i < MOST), other=0)
    is_host = (i < n) & ((all_addr < low) | (all_addr >= high))
    n_host = tl.sum(is_host.to(tl.int32), axis=0)
    first = n - n_host
    slots = tl.minimum(n_host, SLOTS)
    if p == 0:
        slot = i - first
        to = tl.where(is_host & (slot < SLOTS), stage + slot.to(tl.int64) * STRIDE, all_addr)
        tl.store(addr_out + i, to, mask=(i < n) & (i < MOST))
    HEADS: tl.constexpr = (HEAD + BLOCK - 1) // BLOCK
    RESTS: tl.constexpr = (WORDS - HEAD + BLOCK - 1) // BLOCK
    n_heads = slots * HEADS
    if p >= n_heads:
        tl.debug_barrier()
        tl.atomic_add(arrived, 1, sem="release")
    w = tl.arange(0, BLOCK)
    u = p
    while u < n_heads + slots * RESTS:
        is_head = u < n_heads
        v = tl.where(is_head, u, u - n_heads)
        per = tl.where(is_head, HEADS, RESTS)
        begin = (v % per) * BLOCK + tl.where(is_head, 0, HEAD)
        begin = tl.multiple_of(begin, 4)
        ok = w < tl.where(is_head, HEAD, WORDS) - begin
        source = tl.load(addr + first + v // per)
        target = stage + (v // per).to(tl.int64) * STRIDE
        source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + begin
        target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16) + begin
        tl.store(target + w, tl.load(source + w, mask=ok, other=0), mask=ok)
        if is_head & (u + P >= n_heads):
            tl.debug_barrier()
            tl.atomic_add(arrived, 1, sem="release")
        u += P


@triton.jit
def heads_kernel(arrived, P):
    """Ends when P programs have said that their heads are there."""
    seen = tl.atomic_add(arrived, 0, sem="acquire")
    while seen < P:
        seen = tl.atomic_add(arrived, 0, sem="acquire")
    tl.store(arrived, 0)


def fetch(
    groups: GpuGroups, head_bytes: int, blob_bytes: int, stage: Stage, addr_out_G: torch.Tensor
) -> GpuGroups:
    """The same groups with every expert in device memory, as far as the stage has room. One launch,
    to which ``await_heads`` belongs.

    head_bytes: what goes first of each of these experts, of blob_bytes; both multiples of 16.
    Groups in device memory come before the others. addr_out_G: int64 [G_max], receives addresses.
    """
    memory = stage.memory
    assert blob_bytes % 16 == head_bytes % 16 == 0, (head_bytes, blob_bytes)
    assert 0 <= head_bytes <= blob_bytes <= memory.shape[1], (head_bytes, blob_bytes, memory.shape)
    assert memory.data_ptr() % 16 == 0 and memory.stride(0) % 16 == 0, "rows on multiples of 16"
    fetch_kernel[(PROGRAMS,)](
        groups.addr, groups.n_groups, stage.vram_2, memory.data_ptr(), addr_out_G, stage.arrived,
        PROGRAMS, HEAD=head_bytes // 4, WORDS=blob_bytes // 4, STRIDE=memory.stride(0),
        SLOTS=len(memory), MOST=groups.most, GROUPS=triton.next_power_of_2(groups.most),
        BLOCK=_WORDS, num_warps=4,
    )  # fmt: skip
    return replace(groups, addr=addr_out_G)


def await_heads(stage: Stage) -> None:
    """Hold the stream until the heads of a ``fetch`` on another one are there. One launch."""
    heads_kernel[(1,)](stage.arrived, PROGRAMS, num_warps=1)
