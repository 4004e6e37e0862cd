"""Multi-head latent attention (DeepSeek V2 and V3) as a mixer, in the absorbed form.

Letters beside core.types: c kv_lora_rank, r rope_dim, p nope_dim, v v_dim, n = start + T cached
tokens.

A token leaves one row of c + r numbers for all heads: row_j = [latent_j | k_rope_j], the normed
latent and the rotated key. With key[j, h] = [k_b[h] latent_j | k_rope_j] and value[j, h] = v_b[h]
latent_j,
    q[h] . key[j, h] = [q_nope[h] k_b[h] | q_rope[h]] . row_j
so attention runs with one key/value head on the rows as they are, and v_b is applied to the mixed
latent. The state is positional (models/attention.py says why a rejected token does no harm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.kernels.ops import Ops
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec
from strata.models.kv import require_floats
from strata.models.parts import Part
from strata.models.roles import Roles, matrix, vector
from strata.models.spec import MlaSpec

# Absorbed queries take H * (c + r) numbers a token (295 KB in DeepSeek V3): chunks go in pieces.
_ATTEND_TOKENS = 64


class Mla:
    """Latent attention of one layer. Weight roles: see MlaSpec, without the layer prefix.

    mla.k_b and mla.v_b may be Weights [H * p, c] and [H * v, c] of any type, or float tensors of
    those shapes or with H split off; they are widened here, because the absorbed product runs
    over k_b's rows.
    """

    def __init__(
        self,
        layer: int,
        spec: MlaSpec,
        d_model: int,
        norm_eps: float,
        weights: Roles,
        ops: Ops,
        kv_dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self.spec = spec
        require_floats(kv_dtype, "latent attention")
        self._eps, self._ops, self._kv_dtype = norm_eps, ops, kv_dtype
        n_heads, rank = spec.n_heads, spec.q_lora_rank
        q_rows, kv_rows = (
            n_heads * (spec.nope_dim + spec.rope_dim),
            spec.kv_lora_rank + spec.rope_dim,
        )
        shapes = {"kv_a": (kv_rows, d_model), "o": (d_model, n_heads * spec.v_dim)}
        if rank is None:
            shapes["q"] = (q_rows, d_model)
        else:
            shapes |= {"q_a": (rank, d_model), "q_b": (q_rows, rank)}
        self._w = {p: matrix(weights, f"mla.{p}", *shape) for p, shape in shapes.items()}
        self._kv_norm = vector(weights, "mla.kv_a_norm", (spec.kv_lora_rank,), ops.dtype)
        self._q_norm: torch.Tensor | None = None
        if rank is not None:
            self._q_norm = vector(weights, "mla.q_a_norm", (rank,), ops.dtype)
        self._k_b_Hpc = self._per_head(weights, "mla.k_b", spec.nope_dim)
        self._v_b_Hvc = self._per_head(weights, "mla.v_b", spec.v_dim)

    def _per_head(self, weights: Roles, role: str, n_rows: int) -> torch.Tensor:
        """[H, n_rows, c] in the activation dtype."""
        n_heads, rank = self.spec.n_heads, self.spec.kv_lora_rank
        found = weights.get(role)
        if isinstance(found, torch.Tensor):
            split = found.shape == (n_heads, n_rows, rank)
            flat = vector(
                {role: found.flatten(0, 1)} if split else weights,
                role,
                (n_heads * n_rows, rank),
                self._ops.dtype,
            )
        else:
            w = matrix(weights, role, n_heads * n_rows, rank)
            values = dequantize(TYPES[w.type], w.data.cpu().numpy())
            flat = torch.from_numpy(values).to(w.data.device, self._ops.dtype) * w.scale
        return flat.reshape(n_heads, n_rows, rank).contiguous()

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Queries (rotated) and result of the window."""
        spec, dtype = self.spec, self._ops.dtype
        return {
            "mla_q": BufferSpec((spec.n_heads, spec.nope_dim + spec.rope_dim), dtype),
            "mla_out": BufferSpec((spec.n_heads, spec.v_dim), dtype),
        }

    def state(self) -> Mapping[str, StateSpec]:
        """ "latent": the row [latent | k_rope] of every token, as one key/value head."""
        width = self.spec.kv_lora_rank + self.spec.rope_dim
        return {"latent": StateSpec("positional", (1, width), self._kv_dtype)}

    def parts(self) -> tuple[Part, ...]:
        """Queries, append, attend, project back."""
        return (
            Part("q_proj", ("x",), ("mla_q",), self._q_proj),
            Part("latent_append", ("x",), ("latent",), self._latent_append),
            Part("attention", ("mla_q", "latent"), ("mla_out",), self._attention),
            Part("out_proj", ("mla_out",), ("mixer_out",), self._out_proj),
        )

    def commit(self, frame: Frame, n: int) -> None:
        """Positional state needs nothing."""

    def kept(self, frame: Frame) -> Sequence[torch.Tensor]:
        """There is no recurrence."""
        return ()

    def rewrite(
        self, state: SequenceState, start: int, x_nD: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> None:
        """Latents and rotated keys again."""
        self._append(state, start, x_nD)

    def advance(self, state: SequenceState, kept: Sequence[torch.Tensor]) -> None:
        """There is no recurrence."""

    def _q_proj(self, frame: Frame) -> None:
        ops, spec, x = self._ops, self.spec, frame["x"]
        out = frame["mla_q"]
        if self._q_norm is None:
            ops.linears(x, (self._w["q"],), (out,))
        else:
            low = ops.rms_norm(ops.linear(x, self._w["q_a"]), self._q_norm, self._eps)
            ops.linears(low, (self._w["q_b"],), (out,))
        q_rope = out[..., spec.nope_dim :]
        ops.head_rotary(q_rope, None, self._eps, frame.start, spec.rotary, q_rope)

    def _latent_append(self, frame: Frame) -> None:
        self._append(frame.state, frame.start, frame["x"])

    def _append(self, state: SequenceState, start: int, x_nD: torch.Tensor) -> None:
        ops, rank = self._ops, self.spec.kv_lora_rank
        row = ops.linear(x_nD, self._w["kv_a"])
        latent = ops.rms_norm(row[:, :rank], self._kv_norm, self._eps)
        cache = state.tensor(self.layer, "latent")[start : start + x_nD.shape[0]]
        cache[:, 0, :rank].copy_(latent)
        rope = row[:, rank:].unsqueeze(1)
        ops.head_rotary(rope, None, self._eps, start, self.spec.rotary, cache[..., rank:])

    def _attention(self, frame: Frame) -> None:
        for first in range(0, frame.T, _ATTEND_TOKENS):
            self._attend(frame, first, min(first + _ATTEND_TOKENS, frame.T))

    def _attend(self, frame: Frame, first: int, last: int) -> None:
        """Tokens first .. last - 1 of the window; per-head products take one token at a time."""
        spec, rank = self.spec, self.spec.kv_lora_rank
        q = frame["mla_q"][first:last]
        absorbed = q.new_empty(last - first, spec.n_heads, rank + spec.rope_dim)
        absorbed[..., rank:].copy_(q[..., spec.nope_dim :])
        for t in range(last - first):
            q_H1p = q[t, :, : spec.nope_dim].clone().unsqueeze(1)
            absorbed[t, :, :rank] = torch.bmm(q_H1p, self._k_b_Hpc).squeeze(1)
        rows = frame.state.tensor(self.layer, "latent")[: frame.start + last]
        mixed = self._ops.attention(
            absorbed, rows, rows[..., :rank], frame.start + first, spec.scale, None, None, None
        )
        for t in range(last - first):
            value_Hv1 = torch.bmm(self._v_b_Hvc, mixed[t].clone().unsqueeze(-1))
            frame["mla_out"][first + t].copy_(value_Hv1.squeeze(-1))

    def _out_proj(self, frame: Frame) -> None:
        out = frame["mla_out"].reshape(frame.T, -1)
        self._ops.linears(out, (self._w["o"],), (frame["mixer_out"],))
