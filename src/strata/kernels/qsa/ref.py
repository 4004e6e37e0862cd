"""Plain torch truth of qsa; the contract is in the package docstring."""

from __future__ import annotations

import math

import torch

from strata.kernels.ring import past_columns, store_columns
from strata.kernels.rms_norm.ref import rms_norm
from strata.kernels.rotary.ref import RotaryLike, rotary


def block_keys(
    raw_mrd: torch.Tensor,
    weight_d: torch.Tensor,
    eps: float,
    first_m: torch.Tensor,
    spec: RotaryLike,
) -> torch.Tensor:
    """Pooled, normalised and rotated key of every block, [m, d] in raw's dtype."""
    total = raw_mrd[:, 0].clone()
    for i in range(1, raw_mrd.shape[1]):
        total += raw_mrd[:, i]
    key_md = rms_norm(total / raw_mrd.shape[1], weight_d, eps)
    return rotary(key_md.unsqueeze(1), first_m, spec).squeeze(1)


def append_keys(
    ring_Xd: torch.Tensor,
    start: int,
    raw_Td: torch.Tensor,
    block_tokens: int,
    weight_d: torch.Tensor,
    eps: float,
    spec: RotaryLike,
    key_Bd: torch.Tensor,
) -> None:
    """Keys of the blocks that these tokens complete; then their raw keys into the ring."""
    r = block_tokens
    first, end = start // r, (start + raw_Td.shape[0]) // r
    if end > first:
        # the window's own keys come from the window: a chunk may be longer than the ring
        before = past_columns(ring_Xd, start, start - first * r)
        raw_mrd = torch.cat([before, raw_Td])[: (end - first) * r].view(end - first, r, -1)
        first_m = torch.arange(first, end, device=raw_Td.device) * r
        key_Bd[first:end].copy_(block_keys(raw_mrd, weight_d, eps, first_m, spec))
    store_columns(ring_Xd, start, raw_Td)


def _best(score_B: torch.Tensor, n: int) -> torch.Tensor:
    """Ascending indices of the n largest; of equal ones the lower index comes first."""
    # the n-th value is the same for every order of ties, topk's indices are not
    least = score_B.topk(n).values[-1]
    above = score_B > least
    ties = (score_B == least).nonzero().squeeze(-1)
    above[ties[: n - int(above.sum())]] = True
    return above.nonzero().squeeze(-1)


def select_blocks(
    q_TId: torch.Tensor,
    key_Bd: torch.Tensor,
    start: int,
    block_tokens: int,
    budget_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kept blocks of every token, ascending, then -1; int32 [T, budget_blocks]."""
    n_tokens, _, dim = q_TId.shape
    key_Bd = key_Bd.to(q_TId.dtype)
    kept = torch.full((n_tokens, budget_blocks), -1, dtype=torch.int32, device=q_TId.device)
    for t in range(n_tokens):
        n_blocks = (start + t + 1) // block_tokens
        if n_blocks <= budget_blocks:
            kept[t, :n_blocks] = torch.arange(n_blocks, dtype=torch.int32)
            continue
        # BLAS may round by alignment; a fresh copy has the same one wherever the token stands
        score_BI = key_Bd[:n_blocks] @ q_TId[t].clone().t()
        score_B = score_BI.clamp_(min=0).sum(-1) / math.sqrt(dim)
        best = _best(score_B, budget_blocks)
        kept[t, : len(best)] = best
    return kept if out is None else out.copy_(kept)


def token_mask(blocks_Tm: torch.Tensor, start: int, n: int, block_tokens: int) -> torch.Tensor:
    """Which of the n cached tokens each query may see, bool [T, n]."""
    n_tokens = blocks_Tm.shape[0]
    n_blocks = -(-n // block_tokens)
    seen_Tb = torch.zeros(n_tokens, n_blocks + 1, dtype=torch.bool, device=blocks_Tm.device)
    # column n_blocks takes the -1 entries and is cut off
    index = blocks_Tm.long()
    seen_Tb.scatter_(1, torch.where(index < 0, n_blocks, index), True)
    end_T1 = torch.arange(start + 1, start + n_tokens + 1, device=blocks_Tm.device).unsqueeze(1)
    # the block of position end: its tokens before end are the incomplete block, or there are none
    seen_Tb.scatter_(1, end_T1 // block_tokens, True)
    seen_Tn = seen_Tb[:, :n_blocks].repeat_interleave(block_tokens, dim=1)[:, :n]
    return seen_Tn & (torch.arange(n, device=blocks_Tm.device) < end_T1)
