"""The typed face of what happens to heads before attention: norm, rotary, caches, block selection.

As in ``native.fused``: tensors are f32 on the CPU and contiguous unless said otherwise; caches are
f32, f16 or bf16 with a contiguous last axis.
"""

from __future__ import annotations

import torch

from strata.core.errors import EngineError
from strata.native.fused_checks import F32, at, fused_ops, kind_of
from strata.native.rotary_tables import RotaryTables


class FusedHeads:
    """The operations for one instruction set, as a CpuPool calls it."""

    def __init__(self, isa: str) -> None:
        self._ops = fused_ops(isa)

    def head_rotary(
        self,
        x_THd: torch.Tensor,
        weight_d: torch.Tensor | None,
        eps: float,
        start: int,
        rotary: RotaryTables,
        out_THd: torch.Tensor,
    ) -> None:
        """``kernels/rotary`` head_rotary; x and out of any token and head strides, out a cache."""
        n_tokens, heads, d = x_THd.shape
        kind = kind_of(out_THd, "head_rotary: out")
        if x_THd.dtype is not F32 or out_THd.shape != x_THd.shape or 2 * rotary.pairs > d:
            raise EngineError(
                f"head_rotary: x {x_THd.dtype} {list(x_THd.shape)}, out {list(out_THd.shape)} and "
                f"{rotary.pairs} rotated pairs do not belong together"
            )
        kind_of(x_THd, "head_rotary: x")
        weight = 0 if weight_d is None else at(weight_d, d, "head_rotary: weight")
        x, x_token, x_head = x_THd.data_ptr(), x_THd.stride(0), x_THd.stride(1)
        out, out_token, out_head = out_THd.data_ptr(), out_THd.stride(0), out_THd.stride(1)
        item = out_THd.element_size()
        for i, count, cos, sin in rotary.runs(start, n_tokens):
            self._ops.head_rotary(
                count,
                x + 4 * i * x_token,
                x_token,
                x_head,
                heads,
                d,
                weight,
                eps,
                cos,
                sin,
                rotary.pairs,
                1,
                rotary.halves,
                kind,
                out + item * i * out_token,
                out_token,
                out_head,
            )

    def append_keys(
        self,
        ring_Xd: torch.Tensor,
        start: int,
        raw_Td: torch.Tensor,
        block_tokens: int,
        weight_d: torch.Tensor,
        eps: float,
        rotary: RotaryTables,
        key_Bd: torch.Tensor,
    ) -> None:
        """``kernels/qsa`` append_keys: keys of completed blocks, and the raw keys in the ring."""
        (n_tokens, d), entries, r = raw_Td.shape, ring_Xd.shape[0], block_tokens
        first, end = start // r, (start + n_tokens) // r
        ring = at(ring_Xd, entries * d, "append_keys: ring")
        raw = at(raw_Td, n_tokens * d, "append_keys: raw")
        weight = at(weight_d, d, "append_keys: weight")
        kind = kind_of(key_Bd, "append_keys: keys")
        if key_Bd.shape[0] < end or key_Bd.stride(0) != d or entries < r - 1:
            raise EngineError(
                f"append_keys: {end} blocks of {d} numbers into keys {list(key_Bd.shape)}, "
                f"ring of {entries}"
            )
        item = key_Bd.element_size()
        for i, count, cos, sin in rotary.runs(first * r, end - first, r):
            self._ops.block_keys(
                count,
                ring,
                entries,
                start,
                raw,
                d,
                first + i,
                r,
                weight,
                eps,
                cos,
                sin,
                rotary.pairs,
                rotary.halves,
                kind,
                key_Bd.data_ptr() + item * (first + i) * d,
            )
        self._ops.ring_store(n_tokens, ring, entries, start, raw, d)

    def select_blocks(
        self,
        q_TId: torch.Tensor,
        key_Bd: torch.Tensor,
        start: int,
        block_tokens: int,
        budget_blocks: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``kernels/qsa`` select_blocks; int32 [T, budget_blocks]."""
        n_tokens, heads, d = q_TId.shape
        if out is None:
            out = torch.empty(n_tokens, budget_blocks, dtype=torch.int32)
        kind = kind_of(key_Bd, "select_blocks: keys")
        if key_Bd.shape[0] < (start + n_tokens) // block_tokens or key_Bd.stride(0) != d:
            raise EngineError(
                f"select_blocks: keys {list(key_Bd.shape)} for {start + n_tokens} tokens in blocks "
                f"of {block_tokens}, {d} numbers each"
            )
        self._ops.select_blocks(
            n_tokens,
            at(q_TId, n_tokens * heads * d, "select_blocks: q"),
            heads,
            d,
            key_Bd.data_ptr(),
            kind,
            start,
            block_tokens,
            budget_blocks,
            at(out, n_tokens * budget_blocks, "select_blocks: out", torch.int32),
        )
        return out

    def token_mask(
        self, blocks_Tm: torch.Tensor, start: int, n: int, block_tokens: int
    ) -> torch.Tensor:
        """``kernels/qsa`` token_mask; bool [T, n]."""
        n_tokens, budget = blocks_Tm.shape
        seen_Tn = torch.empty(n_tokens, n, dtype=torch.bool)
        if n < start + n_tokens:
            raise EngineError(f"token_mask: {n} positions, but tokens up to {start + n_tokens - 1}")
        self._ops.token_mask(
            n_tokens,
            at(blocks_Tm, n_tokens * budget, "token_mask: blocks", torch.int32),
            budget,
            start,
            n,
            block_tokens,
            seen_Tn.data_ptr(),
        )
        return seen_Tn
