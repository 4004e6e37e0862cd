# mypy: allow-untyped-defs, allow-untyped-decorators
"""The greedy choice on the GPU: the best of each piece of the vocabulary, then of the pieces.

A logit and its id make one int64 key (kernels/router), so the order of comparisons does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.router.triton import column_of, sort_keys
from strata.kernels.triton_common import chained, in_turn

PIECE = 4096
"""Logits of one program."""
_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def piece_kernel(logits, best, STRIDE, V: tl.constexpr, PIECES: tl.constexpr, N: tl.constexpr):
    """Program (t, p): the highest key of piece p."""
    in_turn()
    t = tl.program_id(0)
    piece = tl.program_id(1)
    i = piece * N + tl.arange(0, N)
    x = tl.load(logits + t.to(tl.int64) * STRIDE + i, mask=i < V, other=float("nan"))
    # NaN lies below all numbers, -inf included, and padding behind every id
    key = tl.where(x == x, sort_keys(x, i), _LOWEST + (i ^ 0x7FFFFFFF).to(tl.int64))
    tl.store(best + t * PIECES + piece, tl.max(key, axis=0))


@triton.jit
def best_kernel(best, ids, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Program t."""
    in_turn()
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    key = tl.load(best + t * PIECES + i, mask=i < PIECES, other=_LOWEST)
    tl.store(ids + t, column_of(tl.max(key, axis=0)))


def new_scratch(n_tokens: int, n_vocab: int, device: torch.device | str) -> torch.Tensor:
    """int64 [T, pieces] for ``argmax``."""
    shape = (n_tokens, triton.cdiv(n_vocab, PIECE))
    return torch.empty(shape, dtype=torch.int64, device=device)


def argmax(logits_TV: torch.Tensor, scratch: torch.Tensor, ids_T: torch.Tensor) -> None:
    """ids_T int32 [T] from logits f32 [T, V], rows contiguous. Two launches."""
    n_tokens, n_vocab = logits_TV.shape
    pieces = triton.cdiv(n_vocab, PIECE)
    assert scratch.shape[1] == pieces and len(scratch) >= n_tokens, tuple(scratch.shape)
    piece_kernel[(n_tokens, pieces)](
        logits_TV, scratch, logits_TV.stride(0), V=n_vocab, PIECES=pieces, N=PIECE, num_warps=8,
        **chained(),
    )  # fmt: skip
    block = triton.next_power_of_2(pieces)
    best_kernel[(n_tokens,)](scratch, ids_T, PIECES=pieces, BLOCK=block, num_warps=1, **chained())
