"""Feed-forward halves on the GPU: router logits, shared expert, dense feed-forward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strata.kernels.expert_rows.launch import Hidden, dense_expert
from strata.kernels.expert_rows.triton import dense_gate_up
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.triton import linear
from strata.memory.frame import BufferSpec, Frame
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import products, row_specs, rows_of
from strata.models.parts import Part
from strata.models.spec import DenseFfnSpec, MoeSpec


class GatedFfn:
    """down( silu(gate x) * up x ): two launches."""

    def __init__(self, name: str, roles: GpuRoles, prefix: str) -> None:
        self._name = name
        self.gate, self.up, self.down = (
            roles.matrix(f"{prefix}.{p}") for p in ("gate", "up", "down")
        )
        self._expert = dense_expert(self.gate, self.up, self.down.is_tiles)

    def buffers(self) -> dict[str, BufferSpec]:
        """The hidden rows."""
        return row_specs(self._name, self.gate.n_rows)

    def run(self, frame: Frame, source: str, target: torch.Tensor) -> None:
        """target = the feed-forward of the rows named ``source``."""
        x, h = rows_of(frame, source), rows_of(frame, self._name)
        floats = not (self._expert.tiles_in and self._expert.tiles_out)
        hidden = Hidden(h.x if floats else None, h.q if self._expert.tiles_out else None)
        tiles = self.gate.is_tiles or self.up.is_tiles
        dense_gate_up(self.gate, self.up, x.x, x.q if tiles else None, hidden)
        linear((self.down,), (target,), h.x if floats else None, hidden.h_q)


class GpuMoe:
    """Router and shared expert of one layer."""

    def __init__(self, layer: int, spec: MoeSpec, roles: GpuRoles) -> None:
        self.layer, self.spec = layer, spec
        self.router = roles.matrix("moe.router")
        self.bias = roles.vector("moe.router_bias") if spec.router_bias else None
        self.correction = roles.vector("moe.correction") if spec.correction else None
        self.shared = GatedFfn("shared_h", roles, "shared") if spec.shared_width else None
        self.shared_gate: GpuWeight | None = None
        if spec.shared_width and spec.shared_gate:
            self.shared_gate = roles.matrix("shared.gate_inp")

    @property
    def has_shared(self) -> bool:
        """Whether there is a shared expert."""
        return self.shared is not None

    @property
    def has_gate(self) -> bool:
        """Whether the shared expert has a gate of its own."""
        return self.shared_gate is not None

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Logits, the shared expert's hidden rows, gate and result."""
        f32 = torch.float32
        found = {f"router_logits{self.spec.n_experts}": BufferSpec((self.spec.n_experts,), f32)}
        if self.shared is not None:
            d_model = self.router.n_cols
            found |= self.shared.buffers() | {"shared_out": BufferSpec((d_model,), f32)}
        if self.shared_gate is not None:
            found["shared_gate"] = BufferSpec((1,), f32)
        return found

    def logits(self, frame: Frame) -> torch.Tensor:
        """Where the router's logits lie, f32 [T, E]."""
        return frame[f"router_logits{self.spec.n_experts}"]

    def rule(self) -> dict[str, object]:
        """Keywords of ``kernels.router``."""
        spec = self.spec
        return {
            "n_active": spec.n_active,
            "scoring": spec.scoring,
            "normalize": spec.normalize,
            "scale": spec.scale,
            "bias_E": self.bias,
            "correction_E": self.correction,
            "n_groups": spec.n_groups,
            "groups_kept": spec.groups_kept,
        }

    def router_part(self) -> Part:
        """Logits of the experts and of the shared expert's gate: one launch."""
        gate = ("shared_gate",) if self.shared_gate is not None else ()

        def run(frame: Frame) -> None:
            weights, outs = [self.router], [self.logits(frame)]
            if self.shared_gate is not None:
                weights.append(self.shared_gate)
                outs.append(frame["shared_gate"])
            products(weights, rows_of(frame, "ffn_x"), outs)

        return Part("router", ("ffn_x",), ("router_logits", *gate), run)

    def shared_part(self) -> Part | None:
        """Reads ffn_x, writes shared_out (not gated yet); None without a shared expert."""
        shared = self.shared
        if shared is None:
            return None
        return Part(
            "shared_expert",
            ("ffn_x",),
            ("shared_out",),
            lambda frame: shared.run(frame, "ffn_x", frame["shared_out"]),
        )


class GpuDense:
    """Feed-forward without routing."""

    def __init__(self, layer: int, spec: DenseFfnSpec, roles: GpuRoles) -> None:
        self.layer, self.spec = layer, spec
        self.gated = GatedFfn(f"dense_h{spec.width}", roles, "ffn")

    def buffers(self) -> Mapping[str, BufferSpec]:
        """The hidden rows."""
        return self.gated.buffers()

    def part(self) -> Part:
        """Reads ffn_x, writes ffn_out."""
        return Part(
            "dense_ffn",
            ("ffn_x",),
            ("ffn_out",),
            lambda frame: self.gated.run(frame, "ffn_x", frame["ffn_out"]),
        )
