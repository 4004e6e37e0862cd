# mypy: allow-untyped-defs, allow-untyped-decorators
"""The plan of one layer on the GPU: places of all routed rows and the groups of GPU and CPU.

Equal to ``make_plan`` with these rules, in this order; each moves distinct experts:
    tail skip   missed experts that every row of theirs holds at rank >= tail_rank are SKIPPED
                (tail_rank <= 0: none)
    PCIe share  of the n still missed, the last moved[n - 1] in order of first appearance are PCIE
                where host_addr is not 0 (experts/pcie_share)
    late        CPU experts none of whose rows has a share of at least ``below`` of its token's
                weights are CPU_LATE (experts/late; negative: none, infinity: all)
One program compares all rows with all rows. The scalars lie in device memory, so a recording
follows their changes. ``route_and_plan`` routes in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from strata.core.types import Place
from strata.kernels.router.triton import folded, routed, router_args
from strata.kernels.triton_common import EXACT

_FAST, _PCIE = tl.constexpr(int(Place.FAST)), tl.constexpr(int(Place.PCIE))
_CPU, _LATE = tl.constexpr(int(Place.CPU)), tl.constexpr(int(Place.CPU_LATE))
_SKIPPED = tl.constexpr(int(Place.SKIPPED))


class Groups(Protocol):
    """Groups for the GPU, as kernels/expert_rows takes them: those in VRAM, then the PCIe share.

    addr int64 [R], start int32 [R + 1] (unused groups are empty), entry_row, entry_token int32 [R],
    n_groups int32 [1].
    """

    @property
    def addr(self) -> torch.Tensor: ...
    @property
    def start(self) -> torch.Tensor: ...
    @property
    def entry_row(self) -> torch.Tensor: ...
    @property
    def entry_token(self) -> torch.Tensor: ...
    @property
    def n_groups(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class CpuGroups:
    """Groups for the CPU: those on time, then the late ones; all int32.

    expert [R], start [R + 1] (unused groups are empty), row, token [R]; counts [4]: groups and rows
    on time, late groups and rows.
    """

    expert: torch.Tensor
    start: torch.Tensor
    row: torch.Tensor
    token: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class PlanRules:
    """Device numbers: moved int32, at least [R] (n - 1: of n missed experts), below f32 [1],
    tail_rank int32 [1]."""

    moved: torch.Tensor
    below: torch.Tensor
    tail_rank: torch.Tensor


@triton.jit
def _any(same, flag):
    """Per row: whether the flag is set in any row of the same expert."""
    return tl.max((same & flag[None, :]).to(tl.int32), axis=1) > 0


@triton.jit
def _number_before(key, counted):
    """Per row: how many counted rows have a smaller key."""
    return tl.sum(((key[None, :] < key[:, None]) & counted[None, :]).to(tl.int32), axis=1)


@triton.jit
def _count(flag):
    return tl.sum(flag.to(tl.int32), axis=0)


@triton.jit
def _places(
    same, lead, is_lead, rank, share, expert, ok, vram, host, moved, below, tail, i,
    R: tl.constexpr,
):  # fmt: skip
    """Place of each row; rows of one expert have one."""
    # as a whole, so that it does not wait for the number of missed experts
    moved_of = tl.load(moved + i, mask=i < R, other=0)
    fast = tl.load(vram + expert, mask=ok, other=0) != 0
    readable = tl.load(host + expert, mask=ok, other=0) != 0
    tail_rank = tl.load(tail)
    kept = _any(same, rank < tail_rank) | (tail_rank <= 0)
    missed = ok & (fast == 0) & kept
    missed_lead = missed & is_lead
    n_missed = _count(missed_lead)
    n_moved = tl.sum(tl.where(i + 1 == n_missed, moved_of, 0), axis=0)
    before = _number_before(lead, missed_lead)
    pcie = missed & readable & (before >= n_missed - n_moved)
    threshold = tl.where(ok, tl.load(below), 0.0)
    heavy = _any(same, ok & (share >= threshold.to(tl.float64))) | (threshold < 0)
    place = tl.where(heavy, _CPU, _LATE)
    place = tl.where(pcie, _PCIE, place)
    place = tl.where(kept, place, _SKIPPED)
    return tl.where(fast, _FAST, place)


@triton.jit
def _store_starts(start, group, entry, is_lead, n_groups, n_rows, i, R: tl.constexpr):
    """First entries of the groups; all starts behind the last group are the end."""
    tl.store(start + group, entry, mask=is_lead)
    tl.store(start + i, n_rows + i * 0, mask=(i >= n_groups) & (i <= R))
    tl.store(start + R, n_rows)


@triton.jit
def planned(
    expert, weight, T: tl.constexpr, T2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    vram, host, moved, below, tail, place_out, g_addr, g_start, g_row, g_token, g_count,
    c_expert, c_start, c_row, c_token, c_counts,
):  # fmt: skip
    """Plan of expert and weight [T2, K2]."""
    N: tl.constexpr = T2 * K2
    R: tl.constexpr = T * K
    t2 = tl.arange(0, T2)[:, None]
    k2 = tl.arange(0, K2)[None, :]
    wide = tl.where((t2 < T) & (k2 < K), weight, 0.0).to(tl.float64)
    total = folded(wide, T2, K2)[:, None]
    share = tl.reshape(wide / tl.where(t2 < T, total, 1.0), (N,))
    i = tl.arange(0, N)
    token, rank = i // K2, i % K2
    row = token * K + rank
    ok = (token < T) & (rank < K)
    expert = tl.where(ok, tl.reshape(expert, (N,)), -1 - i)
    same = expert[:, None] == expert[None, :]
    lead = tl.min(tl.where(same, i[None, :], N), axis=1)
    is_lead = ok & (lead == i)
    place = _places(
        same, lead, is_lead, rank, share, expert, ok, vram, host, moved, below, tail, i, R
    )
    tl.store(place_out + row, place.to(tl.int8), mask=ok)

    # VRAM, PCIe, CPU, late, skipped: the order of places is the order of entries
    key = (place * N + lead) * N + i
    entry = _number_before(key, ok)
    group = _number_before(key, is_lead)
    on_gpu = ok & (place <= _PCIE)
    on_time, late = ok & (place == _CPU), ok & (place == _LATE)
    gpu_rows, gpu_groups = _count(on_gpu), _count(on_gpu & is_lead)

    _store_starts(g_start, group, entry, on_gpu & is_lead, gpu_groups, gpu_rows, i, R)
    table = tl.where(place == _FAST, tl.load(vram + expert, mask=on_gpu, other=0), 0)
    table += tl.where(place == _PCIE, tl.load(host + expert, mask=on_gpu, other=0), 0)
    tl.store(g_addr + group, table, mask=on_gpu & is_lead)
    tl.store(g_row + entry, row, mask=on_gpu)
    tl.store(g_token + entry, token, mask=on_gpu)
    tl.store(g_count, gpu_groups)

    on_cpu = on_time | late
    entry -= gpu_rows
    group -= gpu_groups
    cpu_groups = _count(on_cpu & is_lead)
    _store_starts(c_start, group, entry, on_cpu & is_lead, cpu_groups, _count(on_cpu), i, R)
    tl.store(c_expert + group, expert, mask=on_cpu & is_lead)
    tl.store(c_row + entry, row, mask=on_cpu)
    tl.store(c_token + entry, token, mask=on_cpu)
    tl.store(c_counts, _count(on_time & is_lead))
    tl.store(c_counts + 1, _count(on_time))
    tl.store(c_counts + 2, _count(late & is_lead))
    tl.store(c_counts + 3, _count(late))


@triton.jit
def plan_kernel(
    expert, weight, vram, host, moved, below, tail, place, g_addr, g_start, g_row, g_token,
    g_count, c_expert, c_start, c_row, c_token, c_counts,
    T: tl.constexpr, T2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """One program."""
    t = tl.arange(0, T2)[:, None]
    k = tl.arange(0, K2)[None, :]
    ok = (t < T) & (k < K)
    e = tl.load(expert + t * K + k, mask=ok, other=0)
    w = tl.load(weight + t * K + k, mask=ok, other=0.0)
    planned(
        e, w, T, T2, K, K2, vram, host, moved, below, tail, place, g_addr, g_start, g_row,
        g_token, g_count, c_expert, c_start, c_row, c_token, c_counts,
    )  # fmt: skip


@triton.jit
def route_plan_kernel(
    logits, bias, correction, expert, weight, vram, host, moved, below, tail, place, g_addr,
    g_start, g_row, g_token, g_count, c_expert, c_start, c_row, c_token, c_counts, STRIDE,
    T: tl.constexpr, T2: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr,
    K2: tl.constexpr, SCORING: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """One program: router and plan."""
    e, w = routed(
        logits, bias, correction, STRIDE, T, T2, E, E2, K, K2, SCORING, NORMALIZE, SCALE, GROUPS,
        KEPT, BIAS, CORRECTION,
    )  # fmt: skip
    t = tl.arange(0, T2)[:, None]
    k = tl.arange(0, K2)[None, :]
    ok = (t < T) & (k < K)
    tl.store(expert + t * K + k, e, mask=ok)
    tl.store(weight + t * K + k, w, mask=ok)
    planned(
        e, w, T, T2, K, K2, vram, host, moved, below, tail, place, g_addr, g_start, g_row,
        g_token, g_count, c_expert, c_start, c_row, c_token, c_counts,
    )  # fmt: skip


def _outputs(place_R: torch.Tensor, gpu: Groups, cpu: CpuGroups) -> dict[str, torch.Tensor]:
    return {
        "place": place_R,
        "g_addr": gpu.addr,
        "g_start": gpu.start,
        "g_row": gpu.entry_row,
        "g_token": gpu.entry_token,
        "g_count": gpu.n_groups,
        "c_expert": cpu.expert,
        "c_start": cpu.start,
        "c_row": cpu.row,
        "c_token": cpu.token,
        "c_counts": cpu.counts,
    }


def make_plan(
    expert_R: torch.Tensor,
    weight_R: torch.Tensor,
    n_active: int,
    vram_addr_E: torch.Tensor,
    host_addr_E: torch.Tensor,
    rules: PlanRules,
    place_R: torch.Tensor,
    gpu: Groups,
    cpu: CpuGroups,
) -> None:
    """Fill place_R int8 [R] and the groups from expert int32 [R], weight f32 [R]. One launch.

    vram_addr_E, host_addr_E: int64 [E], 0 = not there.
    """
    n_tokens = len(expert_R) // n_active
    plan_kernel[(1,)](
        expert_R, weight_R, vram_addr_E, host_addr_E, rules.moved, rules.below,
        rules.tail_rank, **_outputs(place_R, gpu, cpu), T=n_tokens,
        T2=triton.next_power_of_2(n_tokens), K=n_active, K2=triton.next_power_of_2(n_active),
        num_warps=_warps(n_tokens, n_active), **EXACT,
    )  # fmt: skip


def route_and_plan(
    logits_TE: torch.Tensor,
    expert_R: torch.Tensor,
    weight_R: torch.Tensor,
    vram_addr_E: torch.Tensor,
    host_addr_E: torch.Tensor,
    rules: PlanRules,
    place_R: torch.Tensor,
    gpu: Groups,
    cpu: CpuGroups,
    *,
    n_active: int,
    **rule: object,
) -> None:
    """``router.triton.route`` (its keywords: n_active and rule) and ``make_plan`` in one launch."""
    args = router_args(logits_TE, n_active=n_active, **rule)  # type: ignore[arg-type]
    route_plan_kernel[(1,)](
        expert=expert_R, weight=weight_R, vram=vram_addr_E, host=host_addr_E,
        moved=rules.moved, below=rules.below, tail=rules.tail_rank,
        **_outputs(place_R, gpu, cpu), **args, num_warps=_warps(len(logits_TE), n_active),
        **EXACT,
    )  # fmt: skip


def _warps(n_tokens: int, n_active: int) -> int:
    """Threads for a comparison of all rows with all rows in registers; one warp if it can."""
    rows = triton.next_power_of_2(n_tokens) * triton.next_power_of_2(n_active)
    return 1 if rows <= 32 else 8 if rows <= 64 else 16
