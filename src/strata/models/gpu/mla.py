"""Latent attention on the GPU: products, norm, append, attend, product back.

State and letters as in models/mla.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from triton import next_power_of_2

from strata.kernels.attention.triton import Scratch
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.mla.triton import append, attend
from strata.kernels.rms_norm.triton import add_norm
from strata.kernels.rotary.triton import rotary_table
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import StateSpec
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import Rows, products, row_specs, rows_of
from strata.models.parts import Part
from strata.models.spec import MlaSpec

PROGRAMS_WANTED = 128
"""Programs of one token's attention that keep a large GPU busy."""
TOKENS_OF_A_SPLIT = 32


class GpuMla:
    """Latent attention of one layer. context_tokens: of the state."""

    def __init__(
        self,
        layer: int,
        spec: MlaSpec,
        norm_eps: float,
        roles: GpuRoles,
        kv_dtype: torch.dtype,
        context_tokens: int,
        device: torch.device,
    ) -> None:
        self.layer, self.spec = layer, spec
        self.out_bias: torch.Tensor | None = None
        self._eps, self._kv_dtype = norm_eps, kv_dtype
        self._low = spec.q_lora_rank is not None
        self._in = (roles.matrix("mla.q_a" if self._low else "mla.q"), roles.matrix("mla.kv_a"))
        self._q_b = roles.matrix("mla.q_b") if self._low else None
        self._q_norm = roles.vector("mla.q_a_norm") if self._low else None
        self._kv_norm = roles.vector("mla.kv_a_norm")
        self._k_b = _per_head(roles, "mla.k_b", spec.kv_lora_rank)
        self._v_b = _per_head(roles, "mla.v_b", spec.kv_lora_rank)
        self._o = roles.matrix("mla.o")
        self._rotary = rotary_table(spec.rotary, device)
        most = next_power_of_2(-(-context_tokens // TOKENS_OF_A_SPLIT))
        wanted = max(1, PROGRAMS_WANTED // -(-spec.n_heads // 16))
        self._splits = min(next_power_of_2(wanted), most)

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Products, queries, partial results and the result."""
        spec, f32, n = self.spec, torch.float32, self._splits
        heads, width = spec.n_heads, spec.kv_lora_rank + spec.rope_dim
        found = {
            "mla_q": BufferSpec((heads, spec.nope_dim + spec.rope_dim), f32),
            "mla_row": BufferSpec((width,), f32),
            "mla_absorbed": BufferSpec((heads, width), f32),
            f"mla_max{n}": BufferSpec((heads, n), f32),
            f"mla_sum{n}": BufferSpec((heads, n), f32),
            f"mla_part{n}": BufferSpec((heads, n, spec.kv_lora_rank), f32),
        } | row_specs("mla_out", heads * spec.v_dim)
        if spec.q_lora_rank is not None:
            found["mla_low"] = BufferSpec((spec.q_lora_rank,), f32)
            found |= row_specs("mla_normed", spec.q_lora_rank)
        return found

    def state(self) -> Mapping[str, StateSpec]:
        """ "latent": the row [latent | k_rope] of every token, as one key/value head."""
        width = self.spec.kv_lora_rank + self.spec.rope_dim
        return {"latent": StateSpec("positional", (1, width), self._kv_dtype)}

    def parts(self) -> tuple[Part, ...]:
        """The steps in order."""
        made = ("mla_q", "mla_row", *(("mla_low", "mla_normed") if self._low else ()))
        absorbed = ("mla_absorbed", "latent")
        return (
            Part("q_proj", ("x",), made, self._project),
            Part("latent_append", ("mla_q", "mla_row"), absorbed, self._append),
            Part("attention", absorbed, ("mla_out",), self._attend),
            Part("out_proj", ("mla_out",), ("mixer_out",), self._back),
        )

    def rewrites(self) -> tuple[str, ...]:
        """What ``rewrite`` writes."""
        return ("mla_row", "mla_absorbed", "latent")

    def rewrite(self, frame: Frame, rows: Rows) -> None:
        """Latents and rotated keys again, from other rows; the same launch absorbs the old queries
        once more, which nobody uses."""
        products((self._in[1],), rows, (frame["mla_row"],))
        self._append(frame)

    def _project(self, frame: Frame) -> None:
        flat = frame["mla_q"].flatten(1)
        first = frame["mla_low"] if self._low else flat
        products(self._in, rows_of(frame, "x"), (first, frame["mla_row"]))
        if self._q_b is not None:
            normed = rows_of(frame, "mla_normed")
            add_norm(first, self._q_norm, self._eps, normed.x, quantized=normed.q)
            products((self._q_b,), normed, (flat,))

    def _append(self, frame: Frame) -> None:
        assert isinstance(frame, GpuFrame)
        append(
            frame["mla_row"], self._kv_norm, frame["mla_q"], self._k_b, frame.pos_T,
            self._cache(frame), frame["mla_absorbed"], self._eps, self._rotary,
        )  # fmt: skip

    def _cache(self, frame: Frame) -> torch.Tensor:
        return frame.state.tensor(self.layer, "latent").squeeze(1)

    def _attend(self, frame: Frame) -> None:
        assert isinstance(frame, GpuFrame)
        spec, n, out = self.spec, self._splits, rows_of(frame, "mla_out")
        attend(
            frame["mla_absorbed"],
            self._cache(frame),
            self._v_b,
            frame.pos_T,
            spec.scale,
            Scratch(frame[f"mla_max{n}"], frame[f"mla_sum{n}"], frame[f"mla_part{n}"]),
            out.x.view(frame.T, spec.n_heads, spec.v_dim),
            quantized=out.q if spec.v_dim % 32 == 0 else None,
        )

    def _back(self, frame: Frame) -> None:
        fresh = self.spec.v_dim % 32 == 0
        products((self._o,), rows_of(frame, "mla_out"), (frame["mixer_out"],), fresh=fresh)


def _per_head(roles: GpuRoles, role: str, rank: int) -> GpuWeight:
    """[H * n, rank]; checkpoints may hold it as a plain tensor with H split off."""
    found = roles.found[roles.prefix + role]
    if isinstance(found, GpuWeight):
        return found
    flat = found.reshape(-1, rank)
    return GpuWeight("F32", len(flat), rank, flat)
