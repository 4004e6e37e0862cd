"""Grouped-query attention as a mixer: x [T, D] in, mixer_out [T, D] out, keys and values kept.

Letters beside core.types: G key/value heads, d head dim, n = start + T cached tokens. Biases, q/k
norms, partial rotary, a sigmoid output gate, sinks, sliding windows and block selection come from
the fields of AttentionSpec.

Keys and values are positional state: entry p is written by the window that holds token p, and a
window reads only up to its own last token, so what a rejected token left is overwritten before it
is read. They may be codes of 8 or 4 bits (models/kv).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from strata.kernels.ops import Ops
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec
from strata.models.kv import KvCache, float_dtype
from strata.models.parts import Part
from strata.models.qsa import Indexer
from strata.models.roles import Roles, matrix, vector
from strata.models.spec import AttentionSpec

# Booleans of one selection mask: a chunk of a long prompt is attended in pieces of this size (16
# MiB).
_MASK_ENTRIES = 1 << 24


class Attention:
    """Attention of one layer. Roles as in AttentionSpec and IndexerSpec, without layer prefix."""

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        d_model: int,
        norm_eps: float,
        weights: Roles,
        ops: Ops,
        kv_dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self._eps, self._ops = norm_eps, ops
        self._kv = KvCache(layer, spec.n_kv_heads, spec.head_dim, kv_dtype)
        n_q, n_kv, dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        rows = {
            "q": n_q * dim * (2 if spec.gate else 1),
            "k": n_kv * dim,
            "v": n_kv * dim,
            "o": d_model,
        }
        cols = {"q": d_model, "k": d_model, "v": d_model, "o": n_q * dim}
        self._w = {p: matrix(weights, f"attn.{p}", rows[p], cols[p]) for p in rows}
        biased = [p for p in rows if (spec.o_bias if p == "o" else spec.bias)]
        self._bias = {p: vector(weights, f"attn.{p}_bias", (rows[p],), ops.dtype) for p in biased}
        normed = ("q", "k") if spec.qk_norm else ()
        self._norm = {p: vector(weights, f"attn.{p}_norm", (dim,), ops.dtype) for p in normed}
        self._sinks = vector(weights, "attn.sinks", (n_q,), ops.dtype) if spec.sinks else None
        self._indexer: Indexer | None = None
        if spec.indexer is not None:
            dtype = float_dtype(kv_dtype)
            self._indexer = Indexer(
                layer, spec.indexer, spec.rotary, d_model, norm_eps, weights, ops, dtype
            )

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Queries, keys, values, gate and result of the window."""
        spec, dtype = self.spec, self._ops.dtype
        found = {
            "attn_q": BufferSpec((spec.n_heads, spec.head_dim), dtype),
            "attn_k": BufferSpec((spec.n_kv_heads, spec.head_dim), dtype),
            "attn_v": BufferSpec((spec.n_kv_heads, spec.head_dim), dtype),
            "attn_out": BufferSpec((spec.n_heads, spec.head_dim), dtype),
        }
        if spec.gate:
            found["attn_gate"] = BufferSpec((spec.n_heads, spec.head_dim), dtype)
        return found | dict(self._indexer.buffers() if self._indexer else {})

    def state(self) -> Mapping[str, StateSpec]:
        """Keys (normed, rotated) and values by position, plus the indexer's."""
        return self._kv.state() | dict(self._indexer.state() if self._indexer else {})

    @property
    def decoded_bytes(self) -> int:
        """Of one position, while attention reads an encoded cache; 0 for floats."""
        return self._kv.decoded_bytes

    def parts(self) -> tuple[Part, ...]:
        """Project, append, (index, select,) attend, project back."""
        gate = ("attn_gate",) if self.spec.gate else ()
        blocks = ("index_blocks",) if self._indexer else ()
        return (
            Part("qkv", ("x",), ("attn_q", "attn_k", "attn_v", *gate), self._qkv),
            Part(
                "rope_append",
                ("attn_q", "attn_k", "attn_v"),
                ("attn_q", *self._kv.names),
                self._rope_append,
            ),
            *(self._indexer.parts() if self._indexer else ()),
            Part("attention", ("attn_q", *self._kv.names, *blocks), ("attn_out",), self._attention),
            Part("out_proj", ("attn_out", *gate), ("mixer_out",), self._out_proj),
        )

    def commit(self, frame: Frame, n: int) -> None:
        """Positional and ring state need nothing."""

    def kept(self, frame: Frame) -> Sequence[torch.Tensor]:
        """There is no recurrence."""
        return ()

    def rewrite(
        self, state: SequenceState, start: int, x_nD: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> None:
        """Keys (normed, rotated), values and index keys again."""
        n, spec = x_nD.shape[0], self.spec
        k, v = (x_nD.new_empty(n, spec.n_kv_heads, spec.head_dim) for _ in range(2))
        self._products(x_nD, {"k": k, "v": v})
        self._append(state, start, k, v)
        if self._indexer is not None:
            self._indexer.rewrite(state, start, x_nD)

    def advance(self, state: SequenceState, kept: Sequence[torch.Tensor]) -> None:
        """There is no recurrence."""

    def _products(self, x: torch.Tensor, outs: Mapping[str, torch.Tensor]) -> None:
        self._ops.linears(x, [self._w[name] for name in outs], list(outs.values()))
        for name in self._bias.keys() & outs.keys():
            outs[name].view(x.shape[0], -1).add_(self._bias[name])

    def _qkv(self, frame: Frame) -> None:
        spec, x_TD = self.spec, frame["x"]
        q = frame["attn_q"]
        if spec.gate:
            q = x_TD.new_empty(frame.T, spec.n_heads, 2, spec.head_dim)
        outs = {"q": q, "k": frame["attn_k"], "v": frame["attn_v"]}
        self._products(x_TD, outs)
        if spec.gate:
            frame["attn_q"].copy_(q[:, :, 0])
            frame["attn_gate"].copy_(q[:, :, 1])

    def _rope_append(self, frame: Frame) -> None:
        start, q = frame.start, frame["attn_q"]
        self._ops.head_rotary(q, self._norm.get("q"), self._eps, start, self.spec.rotary, q)
        self._append(frame.state, start, frame["attn_k"], frame["attn_v"])

    def _append(
        self, state: SequenceState, start: int, k_TGd: torch.Tensor, v_TGd: torch.Tensor
    ) -> None:
        """Keys as the projection left them, and values, into the cache."""
        if self._kv.encoded:
            turned = torch.empty_like(k_TGd)
        else:
            turned = state.tensor(self.layer, "k")[start : start + len(k_TGd)]
        norm = self._norm.get("k")
        self._ops.head_rotary(k_TGd, norm, self._eps, start, self.spec.rotary, turned)
        if self._kv.encoded:
            self._kv.write(state, "k", start, turned)
        self._kv.write(state, "v", start, v_TGd)

    def _attention(self, frame: Frame) -> None:
        end = frame.start + frame.T
        step = frame.T
        if self._indexer is not None and not self._indexer.drops_nothing(frame):
            step = max(1, _MASK_ENTRIES // end)
        for first in range(0, frame.T, step):
            self._attend(frame, first, min(first + step, frame.T))

    def _attend(self, frame: Frame, first: int, last: int) -> None:
        """Tokens first .. last - 1 of the window."""
        spec, end = self.spec, frame.start + last
        mask = self._indexer.mask(frame, first, last) if self._indexer else None
        start = frame.start + first
        k, v, start, mask = self._kv.seen(frame.state, start, end, spec.window_tokens, mask)
        self._ops.attention(
            frame["attn_q"][first:last],
            k,
            v,
            start,
            spec.scale,
            spec.window_tokens,
            self._sinks,
            mask,
            frame["attn_out"][first:last],
        )

    def _out_proj(self, frame: Frame) -> None:
        out = frame["attn_out"]
        if self.spec.gate:
            out = out.clone()
            self._ops.sigmoid_times(out, frame["attn_gate"])
        self._products(out.view(frame.T, -1), {"o": frame["mixer_out"]})
