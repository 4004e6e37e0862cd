"""Block selection of query-sparse attention (qwen4_exp's indexer): which tokens a query may see.

Letters beside core.types: I index heads, d index head dim, r tokens per block, B complete blocks.

Every r tokens form a block with one key, made from the raw index keys of just those tokens. A query
keeps the blocks of the largest scores (at most ``budget_blocks``) and always the tokens of the
incomplete block at the end.

State, and why rejected tokens never corrupt it:
- "block_keys", one entry per block. Entry j is written by the window that appends the block's last
  token and is read only by queries at or after that token. If the token is rejected, its position
  is appended again before any later query can see the block, and the entry is written again; if
  an earlier token of the block is rejected, so is the last one.
- "index_ring", raw keys of the newest tokens, read for the at most r - 1 committed tokens before a
  window. See models/ring.py for why rejected tokens never share an entry with a needed one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strata.core.errors import FormatError
from strata.kernels.ops import Ops
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec
from strata.models.parts import Part
from strata.models.ring import assert_can_cut_back, ring_spec
from strata.models.roles import Roles, matrix, vector
from strata.models.spec import IndexerSpec, RotarySpec


class Indexer:
    """The "index" and "select" steps of one layer, and the mask they lead to."""

    def __init__(
        self,
        layer: int,
        spec: IndexerSpec,
        rotary: RotarySpec,
        d_model: int,
        norm_eps: float,
        weights: Roles,
        ops: Ops,
        kv_dtype: torch.dtype,
    ) -> None:
        if spec.block_tokens < 1 or spec.budget_tokens < spec.block_tokens:
            raise FormatError(
                f"layer {layer}: an indexer budget of {spec.budget_tokens} tokens in blocks of "
                f"{spec.block_tokens} selects nothing; check indexer_budget and its compress ratio"
            )
        n_heads, dim = spec.n_heads, spec.head_dim
        self.layer = layer
        self.spec = spec
        self.budget_blocks = spec.budget_tokens // spec.block_tokens
        self._rotary, self._eps, self._ops, self._kv_dtype = rotary, norm_eps, ops, kv_dtype
        self._q = matrix(weights, "index.q", n_heads * dim, d_model)
        self._k = matrix(weights, "index.k", dim, d_model)
        self._q_norm = vector(weights, "index.q_norm", (dim,), ops.dtype)
        self._k_norm = vector(weights, "index.k_norm", (dim,), ops.dtype)

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Index queries, and the kept blocks of every token (-1: none)."""
        return {
            "index_q": BufferSpec((self.spec.n_heads, self.spec.head_dim), self._ops.dtype),
            "index_blocks": BufferSpec((self.budget_blocks,), torch.int32),
        }

    def state(self) -> Mapping[str, StateSpec]:
        """Raw keys of the newest tokens (never rounded) and one key per block."""
        dim, r = self.spec.head_dim, self.spec.block_tokens
        return {
            "index_ring": ring_spec(r - 1, dim, self._ops.dtype),
            "block_keys": StateSpec("positional", (dim,), self._kv_dtype, stride_tokens=r),
        }

    def parts(self) -> tuple[Part, ...]:
        """Project and append, then choose."""
        return (
            Part(
                "index", ("x", "index_ring"), ("index_q", "index_ring", "block_keys"), self._index
            ),
            Part("select", ("index_q", "block_keys"), ("index_blocks",), self._select),
        )

    def drops_nothing(self, frame: Frame) -> bool:
        """Whether every complete block fits the budget even for the window's last token."""
        return (frame.start + frame.T) // self.spec.block_tokens <= self.budget_blocks

    def mask(self, frame: Frame, first: int, end: int) -> torch.Tensor | None:
        """What the window's tokens first .. end - 1 may see: bool [end - first, start + end].

        None: everything.
        """
        if self.drops_nothing(frame):
            return None
        blocks = frame["index_blocks"][first:end]
        return self._ops.token_mask(
            blocks, frame.start + first, frame.start + end, self.spec.block_tokens
        )

    def _index(self, frame: Frame) -> None:
        assert_can_cut_back(frame)
        ops, q_TId, x_TD = self._ops, frame["index_q"], frame["x"]
        raw_Td = x_TD.new_empty(frame.T, self.spec.head_dim)
        ops.linears(x_TD, (self._q, self._k), (q_TId, raw_Td))
        ops.head_rotary(q_TId, self._q_norm, self._eps, frame.start, self._rotary, q_TId)
        self._append(frame.state, frame.start, raw_Td)

    def rewrite(self, state: SequenceState, start: int, x_nD: torch.Tensor) -> None:
        """Raw keys of n tokens from start on again, and the keys of the blocks they complete."""
        self._append(state, start, self._ops.linear(x_nD, self._k))

    def _append(self, state: SequenceState, start: int, raw_Td: torch.Tensor) -> None:
        self._ops.append_keys(
            state.tensor(self.layer, "index_ring"),
            start,
            raw_Td,
            self.spec.block_tokens,
            self._k_norm,
            self._eps,
            self._rotary,
            state.tensor(self.layer, "block_keys"),
        )

    def _select(self, frame: Frame) -> None:
        if self.drops_nothing(frame):
            return
        r = self.spec.block_tokens
        n_blocks = (frame.start + frame.T) // r
        keys = frame.state.tensor(self.layer, "block_keys")[:n_blocks]
        kept = frame["index_blocks"]
        self._ops.select_blocks(frame["index_q"], keys, frame.start, r, self.budget_blocks, kept)
