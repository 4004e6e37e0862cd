"""A decoder with explicit states: what deferral with and without repair means, in plain torch.

Every token leaves one record in every layer (its key and value, its convolution column, ...), made
from one input; a token's mixer output follows from its own input and the records before it. Nothing
is updated in place, so a record can be made again from another input: that is repair. Uses the
project's loader for the weights and its n-gram block; no windows, rings, caches or snapshots.

Letters beside core.types: C residual streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.formats.checkpoint import open_checkpoint
from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.kernels.linear.ref import linear
from strata.kernels.ops import reference_ops
from strata.kernels.weight import Weight
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState
from strata.models.expert_source import ExpertSource, Proj
from strata.models.network import Network, build_network
from strata.models.ngram import Ngram
from strata.models.registry import find_family
from strata.models.spec import AttentionSpec, GdnSpec, MlaSpec, ModelSpec, MoeSpec, RotarySpec
from strata.models.weights import load_weights, plan_weights

Tensor = torch.Tensor
Record = Mapping[str, Tensor]
Late = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, expert_TK, weight_TK) -> bool [T, K]: the rows that are late."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's numbers."""

    spec: ModelSpec
    floats: Mapping[str, Tensor]
    experts: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]
    network: Network
    dtype: torch.dtype

    def __call__(self, role: str) -> Tensor:
        """A role as a float tensor."""
        return self.floats[role]


def _floats(roles: Mapping[str, Weight | Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for role, weight in roles.items():
        if isinstance(weight, Weight):
            values = torch.from_numpy(dequantize(TYPES[weight.type], weight.data.numpy()))
            weight = values.view(weight.n_rows, weight.n_cols) * weight.scale
        found[role] = weight.to(dtype)
    return found


def read_checkpoint(path: Path, dtype: torch.dtype) -> Checkpoint:
    """Everything of a small checkpoint as floats."""
    with open_checkpoint(path) as ckpt:
        family = find_family(ckpt)
        spec = family.spec(ckpt)
        sources, source = family.sources(ckpt, spec), family.expert_source(ckpt, spec)
        plan_weights(ckpt, spec, sources, source)
        roles = load_weights(ckpt, spec, sources, copy=True)
        ops = replace(reference_ops(dtype), linear=lambda x, w: linear(x, w, dtype))
        network = build_network(spec, roles, ops, dtype, torch.device("cpu"))
        experts = {
            (index, expert): _expert_matrices(source, index, expert, dtype)
            for index, layer in enumerate(spec.layers)
            if isinstance(layer.ffn, MoeSpec)
            for expert in range(layer.ffn.n_experts)
        }
        return Checkpoint(spec, _floats(roles, dtype), experts, network, dtype)


def _expert_matrices(
    source: ExpertSource, layer: int, expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    projs: tuple[Proj, ...] = ("gate", "up", "down")
    types = source.types(layer)
    gate, up, down = (
        torch.from_numpy(
            dequantize(TYPES[t], np.ascontiguousarray(source.rows(layer, expert, p)))
        ).to(dtype)
        * source.scale(layer, expert, p)
        for t, p in zip(types, projs, strict=True)
    )
    return gate, up, down


def norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """RMS norm of the last axis, in equal groups."""
    parts = x.reshape(*x.shape[:-1], groups, -1)
    y = parts * torch.rsqrt(parts.double().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)
    return y.reshape(x.shape) * weight


def rotate(x_Hd: Tensor, position: int, spec: RotarySpec) -> Tensor:
    """Rotary embedding of every head at one position."""
    n = len(spec.inv_freq)
    angle = position * torch.tensor(spec.inv_freq, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angle, spec.attention_factor), angle)
    half = spec.pairing == "half"
    a, b = (x_Hd[..., :n], x_Hd[..., n : 2 * n]) if half else (
        x_Hd[..., 0 : 2 * n : 2], x_Hd[..., 1 : 2 * n : 2]
    )  # fmt: skip
    out = torch.complex(a.double(), b.double()) * turn
    pair = [out.real.to(x_Hd.dtype), out.imag.to(x_Hd.dtype)]
    rotated = torch.cat(pair, -1) if half else torch.stack(pair, -1).flatten(-2)
    return torch.cat([rotated, x_Hd[..., 2 * n :]], -1)


class MixerOf:
    """One layer's mixer: ``record`` of a token, and its output from the records up to its own."""

    def __init__(self, ckpt: Checkpoint, layer: int) -> None:
        self.spec: Any = ckpt.spec.layers[layer].mixer
        self.eps = ckpt.spec.norm_eps
        self._ckpt, self._prefix = ckpt, f"layers.{layer}."
        # the records are kept with the result, so that an id stays theirs
        self._known: dict[tuple[int, ...], tuple[tuple[Record, ...], tuple[Tensor, Tensor]]] = {}

    def w(self, role: str) -> Tensor:
        """A weight of this layer."""
        return self._ckpt(self._prefix + role)

    def record(self, x_D: Tensor, position: int) -> Record:
        """What the token leaves behind."""
        return {
            AttentionSpec: self._keys, MlaSpec: self._latent, GdnSpec: self._column,
        }[type(self.spec)](x_D, position)  # fmt: skip

    def output(self, x_D: Tensor, records: Sequence[Record]) -> Tensor:
        """[D]; the last record is the token's own."""
        return {
            AttentionSpec: self._attend, MlaSpec: self._attend_latent, GdnSpec: self._delta,
        }[type(self.spec)](x_D, records)  # fmt: skip

    def _keys(self, x_D: Tensor, position: int) -> Record:
        spec = self.spec
        k = (self.w("attn.k") @ x_D).view(spec.n_kv_heads, -1)
        if spec.qk_norm:
            k = norm(k, self.w("attn.k_norm"), self.eps)
        record = {
            "k": rotate(k, position, spec.rotary),
            "v": (self.w("attn.v") @ x_D).view(spec.n_kv_heads, -1),
        }
        if spec.indexer is not None:
            record["index"] = self.w("index.k") @ x_D
        return record

    def _attend(self, x_D: Tensor, records: Sequence[Record]) -> Tensor:
        spec, position = self.spec, len(records) - 1
        q = (self.w("attn.q") @ x_D).view(spec.n_heads, -1, spec.head_dim)
        q, gate = q[:, 0], q[:, -1]
        if spec.qk_norm:
            q = norm(q, self.w("attn.q_norm"), self.eps)
        q = rotate(q, position, spec.rotary)
        seen = (
            self._selected(x_D, records) if spec.indexer is not None else list(range(len(records)))
        )
        k = torch.stack([records[j]["k"] for j in seen], 1)
        v = torch.stack([records[j]["v"] for j in seen], 1)
        group = spec.n_heads // spec.n_kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        p = torch.softmax((k @ q.unsqueeze(-1)).squeeze(-1) * spec.scale, -1)
        out = (p.unsqueeze(1) @ v).squeeze(1)
        if spec.gate:
            out = out * torch.sigmoid(gate)
        return self.w("attn.o") @ out.flatten()

    def _selected(self, x_D: Tensor, records: Sequence[Record]) -> list[int]:
        """Tokens a query may see: the best blocks, and the incomplete one at the end."""
        spec, rotary, n = self.spec.indexer, self.spec.rotary, len(records)
        r = spec.block_tokens
        n_blocks, budget = n // r, spec.budget_tokens // r
        tail = list(range(n_blocks * r, n))
        if n_blocks <= budget:
            return list(range(n))
        q = norm((self.w("index.q") @ x_D).view(spec.n_heads, -1), self.w("index.q_norm"), self.eps)
        q = rotate(q, n - 1, rotary)
        scores = []
        for block in range(n_blocks):
            mean = torch.stack([records[block * r + i]["index"] for i in range(r)]).mean(0)
            key = rotate(norm(mean, self.w("index.k_norm"), self.eps)[None], block * r, rotary)
            scores.append((q @ key[0]).clamp(min=0).sum())
        best = sorted(torch.stack(scores).topk(budget).indices.tolist())
        return [block * r + i for block in best for i in range(r)] + tail

    def _latent(self, x_D: Tensor, position: int) -> Record:
        spec = self.spec
        row = self.w("mla.kv_a") @ x_D
        latent = norm(row[: spec.kv_lora_rank], self.w("mla.kv_a_norm"), self.eps)
        rope = rotate(row[spec.kv_lora_rank :][None], position, spec.rotary)[0]
        return {"latent": latent, "rope": rope}

    def _attend_latent(self, x_D: Tensor, records: Sequence[Record]) -> Tensor:
        spec, heads = self.spec, self.spec.n_heads
        low = norm(self.w("mla.q_a") @ x_D, self.w("mla.q_a_norm"), self.eps)
        q = (self.w("mla.q_b") @ low).view(heads, -1)
        q_nope, q_rope = q.split((spec.nope_dim, spec.rope_dim), -1)
        q = torch.cat([q_nope, rotate(q_rope, len(records) - 1, spec.rotary)], -1)
        k_b = self.w("mla.k_b").view(heads, spec.nope_dim, -1)
        v_b = self.w("mla.v_b").view(heads, spec.v_dim, -1)
        latent = torch.stack([r["latent"] for r in records])
        rope = torch.stack([r["rope"] for r in records]).expand(heads, -1, -1)
        k = torch.cat([torch.einsum("hpc,nc->hnp", k_b, latent), rope], -1)
        v = torch.einsum("hvc,nc->hnv", v_b, latent)
        p = torch.softmax((k @ q.unsqueeze(-1)).squeeze(-1) * spec.scale, -1)
        return self.w("mla.o") @ (p.unsqueeze(1) @ v).flatten()

    def _column(self, x_D: Tensor, position: int) -> Record:
        keep = torch.exp(
            self.w("gdn.decay")
            * torch.nn.functional.softplus(self.w("gdn.a") @ x_D + self.w("gdn.dt_bias"))
        )
        beta = torch.sigmoid(self.w("gdn.b") @ x_D)
        return {"column": self.w("gdn.qkv") @ x_D, "keep": keep, "beta": beta}

    def _delta(self, x_D: Tensor, records: Sequence[Record]) -> Tensor:
        spec = self.spec
        state, q = self._state_after(tuple(records))
        out = (state * q.unsqueeze(-1)).sum(1) / spec.k_dim**0.5
        z = (self.w("gdn.z") @ x_D).view(spec.n_v_heads, -1)
        opened = torch.sigmoid(z) if spec.output_gate == "sigmoid" else torch.nn.functional.silu(z)
        return self.w("gdn.out") @ (norm(out, self.w("gdn.norm"), self.eps) * opened).flatten()

    def _state_after(self, records: tuple[Record, ...]) -> tuple[Tensor, Tensor]:
        """The matrices after these records, and the last one's query; known ones are looked up."""
        spec, key = self.spec, tuple(id(record) for record in records)
        if key in self._known:
            return self._known[key][1]
        n_key, n_value = spec.n_k_heads * spec.k_dim, spec.n_v_heads * spec.v_dim
        if not records:
            empty = self.w("gdn.a").new_zeros(spec.n_v_heads, spec.k_dim, spec.v_dim)
            return empty, empty
        state, _ = self._state_after(records[:-1])
        record, taps_NP = records[-1], self.w("gdn.conv")
        y = torch.zeros_like(record["column"])
        for back in range(min(spec.conv_taps, len(records))):
            y = y + records[-1 - back]["column"] * taps_NP[:, spec.conv_taps - 1 - back]
        q, k, v = torch.nn.functional.silu(y).split((n_key, n_key, n_value))
        head = torch.arange(spec.n_v_heads)
        grouped = spec.head_order == "grouped"
        head = head // (spec.n_v_heads // spec.n_k_heads) if grouped else head % spec.n_k_heads
        q, k = (
            (z * torch.rsqrt(z.pow(2).sum(-1, keepdim=True) + 1e-6))[head]
            for z in (q.view(spec.n_k_heads, -1), k.view(spec.n_k_heads, -1))
        )
        state = state * record["keep"][:, None, None]
        stored = (state * k.unsqueeze(-1)).sum(1)
        u = (v.view(spec.n_v_heads, -1) - stored) * record["beta"].unsqueeze(-1)
        state = state + k.unsqueeze(-1) * u.unsqueeze(1)
        self._known[key] = records, (state, q)
        return state, q


class Decoder:
    """One sequence. ``run`` gives a window's logits; ``keep`` its first n tokens."""

    def __init__(
        self, ckpt: Checkpoint, late: Late, layers: Sequence[int], repair: bool, own: bool
    ) -> None:
        self.ckpt, self.spec = ckpt, ckpt.spec
        self._late, self._layers, self._repair, self._own = late, set(layers), repair, own
        self._mixers = [MixerOf(ckpt, i) for i in range(ckpt.spec.n_layers)]
        self._kept: list[list[Record]] = [[] for _ in ckpt.spec.layers]
        self._into_ngram: dict[int, list[Tensor]] = {i: [] for i in ckpt.network.ngrams}
        self.tokens: list[int] = []
        self._left: list[list[Record]] = []
        self._window: list[int] = []

    def keep(self, n: int) -> None:
        """Accept the first n tokens of the window just run."""
        self.tokens += self._window[:n]
        for records, left in zip(self._kept, self._left, strict=True):
            records += left[:n]
        for rows in self._into_ngram.values():
            del rows[len(self.tokens) :]

    def cut(self, n: int) -> None:
        """Go back to the first n tokens: their records are as they were then."""
        del self.tokens[n:]
        for records in (*self._kept, *self._into_ngram.values()):
            del records[n:]

    def run(self, window: Sequence[int], exact: bool = False) -> Tensor:
        """Logits [T, V]; exact: nothing is late (a prompt chunk)."""
        ckpt, spec = self.ckpt, self.spec
        self._window, self._left = list(window), []
        n_streams = max(spec.streams, 1)
        embedded = torch.stack([ckpt("embed")[token] for token in window])
        streams = embedded.unsqueeze(1).repeat(1, n_streams, 1)
        pending: tuple[Tensor, Tensor] | None = None
        for layer in range(spec.n_layers):
            if layer in ckpt.network.ngrams:
                streams = self._ngram(layer, streams)
            full = streams if pending is None else _written(streams, *pending)
            x, coeff = self._read(f"layers.{layer}.attn", streams)
            x_r, coeff_r = self._read(f"layers.{layer}.attn", full)
            mixed = self._mix(layer, x, x_r if self._repair else x)
            own = self._repair and self._own
            streams = _written(full, mixed, coeff_r if own else coeff)
            x, coeff = self._read(f"layers.{layer}.ffn", streams)
            on_time, late = self._feed_forward(layer, x, exact)
            streams = _written(streams, on_time, coeff)
            pending = None if late is None else (late, coeff)
        assert pending is None, "the last layer is never late"
        head = ckpt("embed" if spec.tied_head else "head")
        if spec.streams > 1:
            return self._read("head", streams)[0] @ head.t()
        return norm(streams[:, 0], ckpt("final_norm"), spec.norm_eps) @ head.t()

    def _mix(self, layer: int, x_TD: Tensor, x_r_TD: Tensor) -> Tensor:
        mixer, before = self._mixers[layer], self._kept[layer]
        stale, left, outs = list(before), [], []
        for x, x_r in zip(x_TD, x_r_TD, strict=True):
            position = len(stale)
            stale.append(mixer.record(x, position))
            outs.append(mixer.output(x, stale))
            left.append(mixer.record(x_r, position))
        self._left.append(left)
        return torch.stack(outs)

    def _read(self, prefix: str, streams_TCD: Tensor) -> tuple[Tensor, Tensor]:
        """What a block reads, and the coefficients it writes with."""
        ckpt, n = self.ckpt, streams_TCD.shape[1]
        if n == 1:
            x = norm(streams_TCD[:, 0], ckpt(prefix + "_norm"), self.spec.norm_eps)
            return x, x.new_ones(len(x), 1)
        role = prefix + "_read"
        normed = norm(streams_TCD.flatten(1), ckpt(role + ".norm"), self.spec.norm_eps, n)
        low = torch.nn.functional.silu(normed @ ckpt(role + ".down").t() / n)
        gate = torch.sigmoid(low @ ckpt(role + ".up").t())
        x = (gate * normed).view_as(streams_TCD).mean(1)
        if prefix == "head":
            return x, x
        return x, 2 * torch.sigmoid(normed @ ckpt(role + ".inject").t() / n)

    def _ngram(self, layer: int, streams_TCD: Tensor) -> Tensor:
        """The project's block over the whole sequence so far."""
        rows = self._into_ngram[layer]
        rows += list(streams_TCD)
        block: Ngram = self.ckpt.network.ngrams[layer]
        tokens = [*self.tokens, *self._window]
        specs: list[dict[str, Any]] = [{} for _ in self.spec.layers]
        specs[layer] = dict(block.state())
        cpu = torch.device("cpu")
        buffers = {
            "residual": BufferSpec(tuple(streams_TCD.shape[1:]), self.ckpt.dtype),
            "ngram_rows": BufferSpec((block.row_width,), self.ckpt.dtype),
        }
        state = SequenceState(specs, len(tokens), cpu)
        frame = Frame(len(tokens), 1, buffers, {}, state, cpu, keep_inputs=False)
        frame["residual"].copy_(torch.stack(rows))
        frame["ngram_rows"].copy_(block.rows((), tokens))
        block.part().run(frame)
        return frame["residual"][-len(self._window) :].clone()

    def _feed_forward(self, layer: int, x_TD: Tensor, exact: bool) -> tuple[Tensor, Tensor | None]:
        """Rows on time with the shared expert, and late rows (None: a layer that never has any)."""
        w, spec = self.ckpt, self.spec.layers[layer].ffn
        prefix = f"layers.{layer}."
        if not isinstance(spec, MoeSpec):
            gate, up = (x_TD @ w(f"{prefix}ffn.{p}").t() for p in ("gate", "up"))
            return (torch.nn.functional.silu(gate) * up) @ w(prefix + "ffn.down").t(), None
        expert_TK, weight_TK = self._route(prefix, spec, x_TD)
        on_time = torch.zeros_like(x_TD)
        if spec.shared_width:
            gate, up = (x_TD @ w(f"{prefix}shared.{p}").t() for p in ("gate", "up"))
            on_time = (torch.nn.functional.silu(gate) * up) @ w(prefix + "shared.down").t()
            if spec.shared_gate:
                on_time = on_time * torch.sigmoid(x_TD @ w(prefix + "shared.gate_inp").t())
        deferred = layer in self._layers and not exact
        late_TK = self._late(layer, expert_TK, weight_TK) & deferred
        late = torch.zeros_like(x_TD)
        for t, x in enumerate(x_TD):
            for rank, expert in enumerate(expert_TK[t].tolist()):
                gate, up, down = self.ckpt.experts[layer, expert]
                y = down @ (torch.nn.functional.silu(gate @ x) * (up @ x)) * weight_TK[t, rank]
                (late if late_TK[t, rank] else on_time)[t] += y
        return on_time, late if deferred else None

    def _route(self, prefix: str, spec: MoeSpec, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits = x_TD @ self.ckpt(prefix + "moe.router").t()
        scores = torch.sigmoid(logits) if spec.scoring == "sigmoid" else torch.softmax(logits, -1)
        chosen = scores + self.ckpt(prefix + "moe.correction") if spec.correction else scores
        if spec.n_groups > 1:
            grouped = chosen.view(len(x_TD), spec.n_groups, -1)
            best = grouped.topk(2, -1).values.sum(-1).topk(spec.groups_kept, -1).indices
            shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            chosen = grouped.masked_fill(shut.unsqueeze(-1), float("-inf")).flatten(1)
        expert_TK = chosen.topk(spec.n_active, -1).indices
        weight_TK = scores.gather(1, expert_TK)
        if spec.normalize:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return expert_TK, weight_TK * spec.scale


def _written(streams_TCD: Tensor, y_TD: Tensor, coeff_TC: Tensor) -> Tensor:
    return streams_TCD + coeff_TC.unsqueeze(-1) * y_TD.unsqueeze(1)
