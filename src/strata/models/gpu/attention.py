"""Grouped-query attention on the GPU: products, append, (select,) attend, product back.

State and letters as in models/attention and models/qsa.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from triton import next_power_of_2

from strata.kernels.attention.triton import Scratch, Selection, attention
from strata.kernels.attention.triton_append import HeadInput, IndexerInput, append
from strata.kernels.kv_quant.triton import KvScales
from strata.kernels.qsa.triton import select_blocks
from strata.kernels.rotary.triton import rotary_table
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import Rows, products, row_specs, rows_of
from strata.models.kv import KvCache, float_dtype
from strata.models.parts import Part
from strata.models.ring import ring_spec
from strata.models.spec import AttentionSpec

PROGRAMS_WANTED = 128
"""Programs of one token's attention that keep a large GPU busy."""
TOKENS_OF_A_SPLIT = 32


class GpuAttention:
    """Attention of one layer. context_tokens: of the state, which sizes the selection."""

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        norm_eps: float,
        roles: GpuRoles,
        kv_dtype: torch.dtype,
        context_tokens: int,
        device: torch.device,
    ) -> None:
        self.layer, self.spec = layer, spec
        self.eps = norm_eps
        self._kv = KvCache(layer, spec.n_kv_heads, spec.head_dim, kv_dtype)
        self.inputs = [roles.matrix(f"attn.{p}") for p in "qkv"]
        self.output = roles.matrix("attn.o")
        self.biases = [roles.vector(f"attn.{p}_bias") if spec.bias else None for p in "qkv"]
        self.out_bias = roles.vector("attn.o_bias") if spec.o_bias else None
        self.norms = [roles.vector(f"attn.{p}_norm") if spec.qk_norm else None for p in "qk"]
        self.sinks = roles.vector("attn.sinks") if spec.sinks else None
        self.rotary = rotary_table(spec.rotary, device)
        per_group = -(-spec.n_heads // spec.n_kv_heads // 16)
        wanted = max(1, PROGRAMS_WANTED // (spec.n_kv_heads * per_group))
        seen = min(context_tokens, spec.window_tokens or context_tokens)
        most = next_power_of_2(-(-seen // TOKENS_OF_A_SPLIT))
        self._splits = min(next_power_of_2(wanted), most)
        self._index = None
        if spec.indexer is not None:
            self._index = spec.indexer
            self.inputs += [roles.matrix(f"index.{p}") for p in "qk"]
            self.index_norms = {p: roles.vector(f"index.{p}_norm") for p in "qk"}
            self._capacity = -(-context_tokens // spec.indexer.block_tokens)
            self._budget = spec.indexer.budget_tokens // spec.indexer.block_tokens

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Products, queries, partial results and the result."""
        spec, f32 = self.spec, torch.float32
        heads, groups, dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        found = {
            "attn_qg": BufferSpec((heads * dim * (2 if spec.gate else 1),), f32),
            "attn_k": BufferSpec((groups * dim,), f32),
            "attn_v": BufferSpec((groups * dim,), f32),
            "attn_q": BufferSpec((heads, dim), f32),
            f"attn_max{self._splits}": BufferSpec((heads, self._splits), f32),
            f"attn_sum{self._splits}": BufferSpec((heads, self._splits), f32),
            f"attn_part{self._splits}": BufferSpec((heads, self._splits, dim), f32),
        } | row_specs("attn_out", heads * dim)
        if self._index is not None:
            indexer = self._index
            n, d = indexer.n_heads, indexer.head_dim
            found |= {
                "index_qx": BufferSpec((n * d,), f32),
                "index_k": BufferSpec((d,), f32),
                "index_q": BufferSpec((n, d), f32),
                "index_scores": BufferSpec((self._capacity,), f32),
                "index_blocks": BufferSpec((self._budget,), torch.int32),
            }
        return found

    def state(self) -> Mapping[str, StateSpec]:
        """Keys (normed, rotated) and values by position, plus the indexer's."""
        found = self._kv.state()
        if self._index is not None:
            r, dim = self._index.block_tokens, self._index.head_dim
            found["index_ring"] = ring_spec(r - 1, dim, torch.float32)
            dtype = float_dtype(self._kv.dtype)
            found["block_keys"] = StateSpec("positional", (dim,), dtype, stride_tokens=r)
        return found

    def scales(self, state: SequenceState) -> KvScales | None:
        """Of codes; None where the caches hold floats."""
        if not self._kv.encoded:
            return None
        return KvScales(*(state.tensor(self.layer, name) for name in self._kv.names[2:]))

    def parts(self) -> tuple[Part, ...]:
        """The steps in order."""
        made = ["attn_qg", "attn_k", "attn_v"]
        kept = list(self._kv.names)
        out = ["attn_q"]
        select: tuple[Part, ...] = ()
        if self._index is not None:
            made += ["index_qx", "index_k"]
            kept += ["index_ring", "block_keys"]
            out += ["index_q"]
            reads = ("index_q", "block_keys")
            select = (Part("select", reads, ("index_scores", "index_blocks"), self._select),)
        blocks = ("index_blocks",) if select else ()
        reads = ("attn_q", "attn_qg", *self._kv.names, *blocks)
        ring = ("index_ring",) if select else ()
        return (
            Part("qkv", ("x",), tuple(made), self._project),
            Part("rope_append", (*made, *ring), (*out, *kept), self._append),
            *select,
            Part("attention", reads, ("attn_out",), self._attend),
            Part("out_proj", ("attn_out",), ("mixer_out",), self._back),
        )

    def rewrites(self) -> tuple[str, ...]:
        """What ``rewrite`` writes."""
        index = ("index_k", "index_q", "index_ring", "block_keys") if self._index else ()
        return ("attn_k", "attn_v", "attn_q", *self._kv.names, *index)

    def rewrite(self, frame: Frame, rows: Rows) -> None:
        """Keys, values and index keys again, from other rows; the queries beside them are old and
        nobody uses them."""
        weights, outs = list(self.inputs[1:3]), [frame["attn_k"], frame["attn_v"]]
        if self._index is not None:
            weights.append(self.inputs[4])
            outs.append(frame["index_k"])
        products(weights, rows, outs)
        self._append(frame)

    def _project(self, frame: Frame) -> None:
        outs = [frame["attn_qg"], frame["attn_k"], frame["attn_v"]]
        if self._index is not None:
            outs += [frame["index_qx"], frame["index_k"]]
        products(self.inputs, rows_of(frame, "x"), outs)

    def _append(self, frame: Frame) -> None:
        assert isinstance(frame, GpuFrame)
        dim, state = self.spec.head_dim, frame.state
        q_bias, k_bias, v_bias = self.biases
        q_norm, k_norm = self.norms
        stride = 2 * dim if self.spec.gate else dim
        indexer = None
        if self._index is not None:
            spec, norms = self._index, self.index_norms
            width = spec.head_dim
            indexer = IndexerInput(
                HeadInput(frame["index_qx"], width, norm_d=norms["q"]),
                HeadInput(frame["index_k"], width, norm_d=norms["k"]),
                frame["index_q"],
                state.tensor(self.layer, "index_ring"),
                state.tensor(self.layer, "block_keys"),
                spec.block_tokens,
            )
        append(
            HeadInput(frame["attn_qg"], stride, q_bias, q_norm),
            HeadInput(frame["attn_k"], dim, k_bias, k_norm),
            HeadInput(frame["attn_v"], dim, v_bias),
            frame["attn_q"],
            state.tensor(self.layer, "k"),
            state.tensor(self.layer, "v"),
            frame.pos_T,
            self.eps,
            self.rotary,
            indexer,
            self.scales(state),
        )

    def _select(self, frame: Frame) -> None:
        assert isinstance(frame, GpuFrame) and self._index is not None
        select_blocks(
            frame["index_q"],
            frame.state.tensor(self.layer, "block_keys"),
            frame.pos_T,
            self._index.block_tokens,
            frame["index_scores"],
            frame["index_blocks"],
        )

    def _attend(self, frame: Frame) -> None:
        assert isinstance(frame, GpuFrame)
        spec, n, out = self.spec, self._splits, rows_of(frame, "attn_out")
        selection = gate = None
        if self._index is not None:
            selection = Selection(frame["index_blocks"], self._index.block_tokens)
        if spec.gate:
            gate = (frame["attn_qg"][:, spec.head_dim :], 2 * spec.head_dim)
        attention(
            frame["attn_q"],
            frame.state.tensor(self.layer, "k"),
            frame.state.tensor(self.layer, "v"),
            frame.pos_T,
            spec.scale,
            Scratch(frame[f"attn_max{n}"], frame[f"attn_sum{n}"], frame[f"attn_part{n}"]),
            out.x.view(frame.T, spec.n_heads, spec.head_dim),
            window_tokens=spec.window_tokens,
            sinks_H=self.sinks,
            selection=selection,
            gate=gate,
            quantized=out.q if spec.head_dim % 32 == 0 else None,
            scales=self.scales(frame.state),
        )

    def _back(self, frame: Frame) -> None:
        fresh = self.spec.head_dim % 32 == 0
        products((self.output,), rows_of(frame, "attn_out"), (frame["mixer_out"],), fresh=fresh)
