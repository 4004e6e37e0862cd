"""Experts copied from RAM on their way into a product: the addresses and the bits.

Expectation: the definition. Groups outside of the device's own range go, in their order, to the
stage's slots, as many as there are; the others keep their addresses; a copy has its source's bytes.
"""

from __future__ import annotations

import pytest
import torch

from strata.kernels.expert_rows.launch import new_groups
from strata.kernels.expert_rows.triton_fetch import fetch


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("blob_bytes", [16, 4 * 8192, 4 * 8192 + 48])
def test_experts_in_ram_are_copied(triton_device, slots: int, blob_bytes: int) -> None:
    device, n_groups, room = triton_device, 7, 10
    torch.manual_seed(slots + blob_bytes)
    own = torch.randint(0, 256, (4, blob_bytes), dtype=torch.uint8).to(device)
    # stands for mapped memory: all that matters is that it lies elsewhere
    ram = torch.randint(0, 256, (5, blob_bytes), dtype=torch.uint8).to(device)
    chosen = [ram[2], own[1], ram[0], ram[4], own[3], own[0], ram[1]]
    groups = new_groups(room, device)
    groups.addr.fill_(-1)  # a stale address behind the last group
    groups.addr[:n_groups] = torch.tensor([blob.data_ptr() for blob in chosen])
    groups.n_groups[0] = n_groups
    vram = torch.tensor([own.data_ptr(), own.data_ptr() + own.numel()], device=device)
    stage = torch.full((slots, -(-blob_bytes // 128) * 128), 7, dtype=torch.uint8, device=device)
    addr = torch.full((room,), -5, dtype=torch.int64, device=device)
    made = fetch(groups, blob_bytes, vram, stage, addr)
    assert made.addr is addr and made.start is groups.start
    slot = 0
    for g, blob in enumerate(chosen):
        if g in (1, 4, 5) or slot == slots:
            assert addr[g] == blob.data_ptr()
            continue
        assert addr[g] == stage[slot].data_ptr()
        assert torch.equal(stage[slot, :blob_bytes], blob)
        slot += 1
    assert slot == min(slots, 4)
    assert (stage[:, blob_bytes:] == 7).all() and (stage[slot:] == 7).all()
    assert (addr[n_groups:] == -5).all()
