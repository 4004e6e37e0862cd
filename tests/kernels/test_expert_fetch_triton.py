"""Experts copied from RAM on their way into a product: the addresses, the bits, what is said.

Expectation: the definition. Groups outside of the device's own range go, in their order, to the
stage's slots, as many as there are; the others keep their addresses; a copy has its source's bytes.
"""

from __future__ import annotations

import pytest
import torch

from strata.kernels.expert_rows.launch import new_groups
from strata.kernels.expert_rows.triton_fetch import PROGRAMS, Stage, await_heads, fetch


@pytest.mark.parametrize(
    "head_bytes, blob_bytes, slots, cached",
    [
        (16, 16, 3, 0),
        (4 * 2048, 8 * 2048 + 48, 8, 3),
        (0, 4 * 2048, 1, 3),
        (96, 8 * 2048, 3, 3),
        (8 * 2048, 8 * 2048, 8, 0),
    ],
)
def test_experts_in_ram_are_copied(
    triton_device, head_bytes: int, blob_bytes: int, slots: int, cached: int
) -> None:
    device, room, count = triton_device, 10, min(slots, 4)
    torch.manual_seed(slots + blob_bytes)
    own = torch.randint(0, 256, (4, blob_bytes), dtype=torch.uint8).to(device)
    # stands for mapped memory: all that matters is that it lies elsewhere
    ram = torch.randint(0, 256, (5, blob_bytes), dtype=torch.uint8).to(device)
    chosen = [*(own[1], own[3], own[0])[:cached], ram[2], ram[0], ram[4], ram[1]]
    groups = new_groups(room, device)
    groups.addr.fill_(-1)  # a stale address behind the last group
    groups.addr[: len(chosen)] = torch.tensor([blob.data_ptr() for blob in chosen])
    groups.n_groups[0] = len(chosen)
    memory = torch.full((slots, -(-blob_bytes // 128) * 128), 7, dtype=torch.uint8, device=device)
    vram = torch.tensor([own.data_ptr(), own.data_ptr() + own.numel()], device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    stage = Stage(memory, vram, arrived)
    addr = torch.full((room,), -5, dtype=torch.int64, device=device)
    made = fetch(groups, head_bytes, blob_bytes, stage, addr)
    assert made.addr is addr and made.start is groups.start
    assert arrived.tolist() == [PROGRAMS]
    await_heads(stage)
    assert arrived.tolist() == [0]
    kept = [blob.data_ptr() for blob in chosen]
    staged = [memory[slot].data_ptr() for slot in range(count)]
    wanted = kept[:cached] + staged + kept[cached + count :]
    assert addr.tolist() == wanted + [-5] * (room - len(chosen))
    for slot in range(count):
        assert torch.equal(memory[slot, :blob_bytes], chosen[cached + slot])
    assert (memory[:, blob_bytes:] == 7).all() and (memory[count:] == 7).all()


def test_nothing_to_copy_is_said_too(triton_device) -> None:
    """All groups are in device memory, or there is none: addresses as they were."""
    own = torch.zeros(3, 64, dtype=torch.uint8, device=triton_device)
    vram = torch.tensor([own.data_ptr(), own.data_ptr() + own.numel()], device=triton_device)
    memory = torch.zeros(2, 128, dtype=torch.uint8, device=triton_device)
    stage = Stage(memory, vram, torch.zeros(1, dtype=torch.int32, device=triton_device))
    for n in (2, 0):
        groups = new_groups(4, triton_device)
        groups.addr[:2] = torch.tensor([own[2].data_ptr(), own[0].data_ptr()])
        groups.n_groups[0] = n
        addr = torch.full((4,), -5, dtype=torch.int64, device=triton_device)
        fetch(groups, 32, 64, stage, addr)
        await_heads(stage)
        assert addr.tolist() == groups.addr[:n].tolist() + [-5] * (4 - n)
