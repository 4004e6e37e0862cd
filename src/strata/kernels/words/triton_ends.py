# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Both ends of a window: numbers that the host wrote before it, and those that the host reads after
it. One launch each, in host memory that the GPU maps, instead of a copy for every tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.triton_common import EXACT
from strata.kernels.words.triton import announce

_BLOCK = 1024
START_WORDS = 2
"""int32 before the ids in what ``take_in`` reads: the committed copy of recurrent state, and the
position of the first token."""


@triton.jit
def take_in_kernel(
    words, rows, which, pos, ids, rows_out,
    T: tl.constexpr, BLOCK_T: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p copies BLOCK numbers of the rows; the first one also takes the words."""
    p = tl.program_id(0)
    if p == 0:
        t = tl.arange(0, BLOCK_T)
        id_T = tl.load(words + 2 + t, mask=t < T, other=0)
        start = tl.load(words + 1)
        tl.store(which, tl.load(words))
        tl.store(pos + t, start + t, mask=t < T)
        tl.store(ids + t, id_T.to(ids.dtype.element_ty), mask=t < T)
    if N > 0:
        i = p * BLOCK + tl.arange(0, BLOCK)
        tl.store(rows_out + i, tl.load(rows + i, mask=i < N, other=0.0), mask=i < N)


@triton.jit
def hand_out_kernel(
    choice, expert, place, choice_out, expert_out, place_out, word: tl.int64, value: tl.int32,
    C: tl.constexpr, BLOCK_C: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    RINGS: tl.constexpr,
):  # fmt: skip
    """One program."""
    c = tl.arange(0, BLOCK_C)
    tl.store(choice_out + c, tl.load(choice + c, mask=c < C, other=0), mask=c < C)
    for first in range(0, N, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(expert_out + i, tl.load(expert + i, mask=i < N, other=0), mask=i < N)
        tl.store(place_out + i, tl.load(place + i, mask=i < N, other=0), mask=i < N)
    if RINGS:
        tl.debug_barrier()
        announce(word, value)


def take_in(
    words: torch.Tensor,
    rows: torch.Tensor | None,
    which: torch.Tensor,
    pos_T: torch.Tensor,
    ids_T: torch.Tensor,
    rows_out: torch.Tensor | None,
) -> None:
    """words int32 [START_WORDS + T] and rows f32, page-locked, into which int32 [1], pos_T int32,
    ids_T and rows_out (contiguous, as large as rows). First of its graph, so it waits for nobody
    in mid-kernel."""
    n_tokens, n = len(pos_T), 0 if rows is None else rows.numel()
    take_in_kernel[(max(1, triton.cdiv(n, _BLOCK)),)](
        words, words if rows is None else rows, which, pos_T, ids_T,
        which if rows_out is None else rows_out, T=n_tokens,
        BLOCK_T=triton.next_power_of_2(n_tokens), N=n, BLOCK=_BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip


def hand_out(
    choice_T2: torch.Tensor,
    expert_LR: torch.Tensor,
    place_LR: torch.Tensor,
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ring: tuple[int, int] | None,
) -> None:
    """int32 [T, 2], int32 and int8 [L, R] into page-locked outs of the same shapes; then ring =
    (address of a word, its new value), if there is one."""
    n, count = expert_LR.numel(), choice_T2.numel()
    word, value = ring or (0, 0)
    hand_out_kernel[(1,)](
        choice_T2, expert_LR, place_LR, *outs, word, value, C=count,
        BLOCK_C=triton.next_power_of_2(count), N=n, BLOCK=_BLOCK, RINGS=ring is not None,
        num_warps=4, **EXACT,
    )  # fmt: skip
