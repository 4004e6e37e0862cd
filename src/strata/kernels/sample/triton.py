# mypy: allow-untyped-defs, allow-untyped-decorators
"""The greedy choice on the GPU: the best of each piece of the vocabulary, then of the pieces.

A logit and its id make one int64 key (kernels/router), so the order of comparisons does not matter.
The program that ends last of a token's finds the best of all pieces, by a counter that it sets back
to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strata.kernels.router.triton import column_of, sort_keys
from strata.kernels.triton_common import EXACT

PIECE = 2048
"""Logits of one program."""
_LOWEST = tl.constexpr(-(2**63))
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def choose_kernel(
    logits, best, bad, done, choice, STRIDE,
    V: tl.constexpr, PIECES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p): the highest key of piece p, and how many of its logits are not finite."""
    t = tl.program_id(0)
    piece = tl.program_id(1)
    i = piece * N + tl.arange(0, N)
    x = tl.load(logits + t.to(tl.int64) * STRIDE + i, mask=i < V, other=float("nan"))
    # NaN lies below all numbers, -inf included, and padding behind every id
    key = tl.where(x == x, sort_keys(x, i), _LOWEST + (i ^ 0x7FFFFFFF).to(tl.int64))
    n_bad = tl.sum(((i < V) & ((x != x) | (tl.abs(x) == _INFINITY))).to(tl.int32), axis=0)
    tl.store(best + t * PIECES + piece, tl.max(key, axis=0))
    tl.store(bad + t * PIECES + piece, n_bad)
    # both are out before this program counts itself
    tl.debug_barrier()
    if tl.atomic_add(done + t, 1, sem="acq_rel") == PIECES - 1:
        tl.store(done + t, 0)
        p = tl.arange(0, BLOCK)
        at = t * PIECES + p
        keys = tl.load(best + at, mask=p < PIECES, other=_LOWEST, cache_modifier=".cg")
        counts = tl.load(bad + at, mask=p < PIECES, other=0, cache_modifier=".cg")
        tl.store(choice + 2 * t, column_of(tl.max(keys, axis=0)))
        tl.store(choice + 2 * t + 1, tl.sum(counts, axis=0))


@dataclass(frozen=True)
class Scratch:
    """best int64, bad int32, both [T, pieces]; done int32 [T], which begins as zeros."""

    best: torch.Tensor
    bad: torch.Tensor
    done: torch.Tensor


def n_pieces(n_vocab: int) -> int:
    """Programs that share a row of logits."""
    return triton.cdiv(n_vocab, PIECE)


def choose(logits_TV: torch.Tensor, scratch: Scratch, choice_T2: torch.Tensor) -> None:
    """choice_T2 int32 [T, 2] of logits f32 [T, V], rows contiguous: the id as ``sample.argmax`` has
    it, and how many logits are NaN or infinite. One launch."""
    n_tokens, n_vocab = logits_TV.shape
    pieces = n_pieces(n_vocab)
    assert scratch.best.shape == scratch.bad.shape == (n_tokens, pieces), tuple(scratch.best.shape)
    choose_kernel[(n_tokens, pieces)](
        logits_TV, scratch.best, scratch.bad, scratch.done, choice_T2, logits_TV.stride(0),
        V=n_vocab, PIECES=pieces, N=PIECE, BLOCK=triton.next_power_of_2(pieces), num_warps=4,
        **EXACT,
    )  # fmt: skip
