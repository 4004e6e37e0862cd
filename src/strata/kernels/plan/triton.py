# mypy: allow-untyped-defs, allow-untyped-decorators
"""The plan of one layer on the GPU: places of all routed rows and the groups of GPU and CPU.

Equal to ``make_plan`` with these rules, in this order; each moves distinct experts:
    tail skip   missed experts that every row of theirs holds at rank >= tail_rank are SKIPPED
                (tail_rank <= 0: none)
    PCIe share  of the n still missed, the last moved[n - 1] in order of first appearance are PCIE
                where host_addr is not 0 (experts/pcie_share)
    late        CPU experts none of whose rows has a share of at least ``below`` of its token's
                weights are CPU_LATE (experts/late; negative: none, infinity: all)
Program t routes token t; the last one to come plans for all, by a counter that it sets back to 0.
What the host has to do is written where it reads it, and rung, in the same launch. The scalars lie
in device memory, so a recording follows their changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from strata.kernels.plan.triton_groups import plan_all, plan_one, say
from strata.kernels.router.triton import MOST_ACTIVE, folded, routed, router_args
from strata.kernels.triton_common import EXACT, INTERPRET

MOST_TOKENS = 8
"""Bytes of an expert's number."""
MOST_ROWS = 255


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
class ForHost:
    """Where the host's part goes.

    counts: int32 [5] on the device: groups and rows on time, late groups and rows, all groups.
    ints: address of the payload (kernels/words) of a window of n_rows rows, int32, written when
    there are groups. x_TD f32, contiguous: copied to the address x; None: no activations. Addresses
    are the device's, multiples of 16. word: address of the word that becomes ``value`` when all of
    it is there; None: no ring.
    """

    counts: torch.Tensor
    ints: int
    n_rows: int
    x_TD: torch.Tensor | None = None
    x: int = 0
    word: int | None = None
    value: int = 0


@dataclass(frozen=True)
class PlanRules:
    """Device numbers: moved int32, at least [R] (n - 1: of n missed experts), below f32 [1],
    tail_rank int32 [1]."""

    moved: torch.Tensor
    below: torch.Tensor
    tail_rank: torch.Tensor


@dataclass(frozen=True)
class PlanScratch:
    """Between programs of a launch, 0 between launches: int64 [E] what tokens say of an expert;
    int32 [1] programs that have."""

    said: torch.Tensor
    arrived: torch.Tensor


def new_scratch(n_experts: int, device: torch.device | str) -> PlanScratch:
    """For layers of up to n_experts experts."""
    said = torch.zeros(n_experts, dtype=torch.int64, device=device)
    return PlanScratch(said, torch.zeros(1, dtype=torch.int32, device=device))


@triton.jit
def _bring_near(address):
    """Into the first-level cache, while something else is waited for."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1];\nmov.u32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _heavy(w, below, K: tl.constexpr, KP: tl.constexpr):
    """Which rows have a share of at least ``below`` of their token's weights."""
    k = tl.arange(0, KP)
    heavy = (k * 0 + 1) * (below < 0).to(tl.int32)
    if below >= 0:
        wide = tl.where(k < K, w, 0.0).to(tl.float64)
        total = tl.sum(folded(tl.reshape(wide, (1, KP)), 1, KP), axis=0)
        share = wide / (tl.full((KP,), 1.0, tl.float64) * total)
        heavy = (share >= below.to(tl.float64)).to(tl.int32)
    return heavy


@triton.jit(do_not_specialize=["value"])
def plan_kernel(
    logits, bias, correction, expert, weight, vram, host, moved, below, tail, place, g_addr,
    g_start, g_row, g_token, g_count, counts, said, arrived, x, x_out: tl.int64, ints: tl.int64,
    word: tl.int64, value: tl.int32, STRIDE, T: tl.constexpr, T2: tl.constexpr, K2: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, R: tl.constexpr, ROUTES: tl.constexpr, HOST: tl.constexpr,
    RINGS: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """Program t: token t; without ROUTES its experts and weights are there already. D: activations
    of a token that the host gets."""
    t = tl.program_id(0)
    k = tl.arange(0, KP)
    if ROUTES and T == 1:
        # every 32 bytes of what experts will point at
        s = tl.arange(0, (E2 + 3) // 4) * 4
        _bring_near(vram + s)
        if HOST:
            _bring_near(host + s)
    moved_k = tl.load(moved + k, mask=(k < K) & (T == 1), other=0)
    threshold = tl.load(below)
    tail_rank = tl.load(tail)
    if D > 0:
        d = tl.arange(0, D2)
        to = tl.multiple_of(x_out.to(tl.pointer_type(tl.float32)), 16) + t * D
        tl.store(to + d, tl.load(x + t * D + d, mask=d < D, other=0.0), mask=d < D)
    if ROUTES:
        e, w = routed(
            logits + t * STRIDE, bias, correction, E, E2, K, KP, SCORING, NORMALIZE, SCALE,
            GROUPS, KEPT, BIAS, CORRECTION,
        )  # fmt: skip
        tl.store(expert + t * K + k, e, mask=k < K)
        tl.store(weight + t * K + k, w, mask=k < K)
    else:
        e = tl.load(expert + t * K + k, mask=k < K, other=0)
        w = tl.load(weight + t * K + k, mask=k < K, other=0.0)
    heavy = _heavy(w, threshold, K, KP)
    kept = ((k < tail_rank) | (tail_rank <= 0)).to(tl.int32)
    if T == 1:
        plan_one(
            e, heavy, kept, vram, host, moved_k, place, g_addr, g_start, g_row, g_token, g_count,
            counts, ints, word, value, K, KP, R, HOST, RINGS,
        )  # fmt: skip
    else:
        say(e, heavy, kept, t, said, K, KP)
        tl.debug_barrier()
        # the last one's fence is cumulative, but activations go to the host: a scope as wide
        if D > 0:
            before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        else:
            before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        if before == T - 1:
            tl.store(arrived, 0)
            plan_all(
                expert, said, vram, host, moved, place, g_addr, g_start, g_row, g_token, g_count,
                counts, ints, word, value, T, K, T2, K2, R, HOST, RINGS,
            )  # fmt: skip


def _launch(
    expert_R: torch.Tensor,
    weight_R: torch.Tensor,
    n_active: int,
    vram_addr_E: torch.Tensor,
    host_addr_E: torch.Tensor,
    rules: PlanRules,
    place_R: torch.Tensor,
    gpu: Groups,
    host: ForHost | None,
    scratch: PlanScratch,
    routing: dict[str, object],
    routes: bool,
) -> None:
    n_tokens = len(expert_R) // n_active
    assert n_tokens <= MOST_TOKENS, f"{n_tokens} tokens, at most {MOST_TOKENS}"
    assert len(expert_R) <= MOST_ROWS, f"{len(expert_R)} rows, at most {MOST_ROWS}"
    assert len(scratch.said) >= len(vram_addr_E), "scratch for fewer experts"
    to = host or ForHost(scratch.arrived, 0, 0)
    width = 0
    if to.x_TD is not None:
        assert to.x_TD.is_contiguous() and to.x_TD.dtype == torch.float32, "x is f32, contiguous"
        width = to.x_TD.shape[1]
    plan_kernel[(n_tokens,)](
        expert=expert_R, weight=weight_R, vram=vram_addr_E, host=host_addr_E,
        moved=rules.moved, below=rules.below, tail=rules.tail_rank, place=place_R,
        g_addr=gpu.addr, g_start=gpu.start, g_row=gpu.entry_row, g_token=gpu.entry_token,
        g_count=gpu.n_groups, counts=to.counts, said=scratch.said, arrived=scratch.arrived,
        x=weight_R if to.x_TD is None else to.x_TD, x_out=to.x, ints=to.ints, word=to.word or 0,
        value=to.value, T=n_tokens, T2=triton.next_power_of_2(n_tokens),
        K2=triton.next_power_of_2(n_active), D=width, D2=triton.next_power_of_2(max(width, 1)),
        R=to.n_rows, ROUTES=routes, HOST=host is not None, RINGS=to.word is not None, **routing,
        num_warps=1, **EXACT,
    )  # fmt: skip


def make_plan(
    expert_R: torch.Tensor,
    weight_R: torch.Tensor,
    n_active: int,
    vram_addr_E: torch.Tensor,
    host_addr_E: torch.Tensor,
    rules: PlanRules,
    place_R: torch.Tensor,
    gpu: Groups,
    host: ForHost | None,
    scratch: PlanScratch,
) -> None:
    """Fill place_R int8 [R] and the groups from expert int32 [R], weight f32 [R]. One launch.

    vram_addr_E, host_addr_E: int64 [E], 0 = not there. host: None when nothing can be left for it.
    """
    names = ("logits", "bias", "correction")
    unused: dict[str, object] = dict.fromkeys(names, weight_R)
    unused |= dict.fromkeys(("STRIDE", "SCALE", "GROUPS", "KEPT"), 1) | {"SCORING": "softmax"}
    unused |= dict.fromkeys(("NORMALIZE", "BIAS", "CORRECTION"), False)
    unused |= {"E": 1, "E2": 1, "K": n_active, "KP": MOST_ACTIVE}
    _launch(
        expert_R, weight_R, n_active, vram_addr_E, host_addr_E, rules, place_R, gpu, host, scratch,
        unused, routes=False,
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
    host: ForHost | None,
    scratch: PlanScratch,
    *,
    n_active: int,
    **rule: object,
) -> None:
    """``router.triton.route`` (its keywords: n_active and rule) and ``make_plan`` in one launch."""
    routing = router_args(logits_TE, n_active=n_active, **rule)  # type: ignore[arg-type]
    _launch(
        expert_R, weight_R, n_active, vram_addr_E, host_addr_E, rules, place_R, gpu, host, scratch,
        routing, routes=True,
    )  # fmt: skip
