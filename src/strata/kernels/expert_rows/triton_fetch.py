# mypy: allow-untyped-defs, allow-untyped-decorators
"""Experts of a window that lie in RAM are copied over the link before they are multiplied.

A product reads tiles in pieces of 64 bytes, and the link carries those at two thirds of its speed
(35 of 50 GB/s on PCIe 5). Here every warp asks for 512 bytes at once. Bits are copied, so nothing
else changes. Knows no products.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from strata.kernels.expert_rows.launch import GpuGroups

_WORDS = 8192
"""32-bit words a program copies: with 8 warps 8 loads of 16 bytes in flight a thread."""


@triton.jit
def fetch_kernel(
    addr, n_groups, vram, stage, addr_out,
    WORDS: tl.constexpr, STRIDE: tl.constexpr, SLOTS: tl.constexpr, MOST: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, g): BLOCK words of group g's expert, if it lies outside of vram[0] .. vram[1]."""
    g = tl.program_id(1)
    n = tl.load(n_groups)
    low = tl.load(vram)
    high = tl.load(vram + 1)
    if g < n:
        i = tl.arange(0, GROUPS)
        all_addr = tl.load(addr + i, mask=(i < n) & (i < MOST), other=0)
        is_host = (i < n) & ((all_addr < low) | (all_addr >= high))
        slot = tl.sum((is_host & (i < g)).to(tl.int32))
        own = tl.load(addr + g)
        to = own
        if ((own < low) | (own >= high)) & (slot < SLOTS):
            to = stage + slot.to(tl.int64) * STRIDE
            word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            source = tl.multiple_of(own.to(tl.pointer_type(tl.int32)), 16)
            target = tl.multiple_of(to.to(tl.pointer_type(tl.int32)), 16)
            words = tl.load(source + word, mask=word < WORDS, other=0)
            tl.store(target + word, words, mask=word < WORDS)
        if tl.program_id(0) == 0:
            tl.store(addr_out + g, to)


def fetch(
    groups: GpuGroups, blob_bytes: int, vram_2: torch.Tensor, stage: torch.Tensor,
    addr_out_G: torch.Tensor,
) -> GpuGroups:  # fmt: skip
    """The same groups with every expert in device memory, as far as the stage has room. One launch.

    blob_bytes: of each of these experts, a multiple of 16. vram_2: int64 [2] on the device, begin
    and end of the addresses that are device memory already. stage: uint8 [slots, bytes], rows on
    multiples of 16. addr_out_G: int64 [G_max], receives the addresses.
    """
    assert blob_bytes % 16 == 0 and blob_bytes <= stage.shape[1], (blob_bytes, stage.shape)
    assert stage.data_ptr() % 16 == 0 and stage.stride(0) % 16 == 0, "rows on multiples of 16"
    words = blob_bytes // 4
    fetch_kernel[(triton.cdiv(words, _WORDS), groups.most)](
        groups.addr, groups.n_groups, vram_2, stage.data_ptr(), addr_out_G,
        WORDS=words, STRIDE=stage.stride(0), SLOTS=len(stage), MOST=groups.most,
        GROUPS=triton.next_power_of_2(groups.most), BLOCK=_WORDS, num_warps=8,
    )  # fmt: skip
    return replace(groups, addr=addr_out_G)
