"""The FFN half of a layer as models see it: router, shared expert, or a dense feed-forward.

Routed experts are not here: a window computes them wherever they lie. This file only says which
experts a token wants and with which weights.
"""

from __future__ import annotations

import torch

from strata.kernels.ops import Ops
from strata.kernels.pointwise import sigmoid, silu
from strata.kernels.router import route as route_kernel
from strata.kernels.weight import Weight
from strata.memory.frame import Frame
from strata.models.parts import Part
from strata.models.roles import Roles, matrix, rows_matrix, vector
from strata.models.spec import DenseFfnSpec, MoeSpec


def route(
    logits_TE: torch.Tensor,
    spec: MoeSpec,
    bias_E: torch.Tensor | None = None,
    correction_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert_TK int32, weight_TK) by the model's rule (kernels/router); bias joins the logits."""
    if bias_E is not None:
        logits_TE = logits_TE + bias_E
    return route_kernel(
        logits_TE,
        n_active=spec.n_active,
        scoring=spec.scoring,
        normalize=spec.normalize,
        scale=spec.scale,
        correction_E=correction_E,
        n_groups=spec.n_groups,
        groups_kept=spec.groups_kept,
    )


class MoeFfn:
    """Router and shared expert of one layer. ``roles``: moe.* and shared.* as listed in MoeSpec."""

    def __init__(self, layer: int, spec: MoeSpec, roles: Roles, ops: Ops) -> None:
        self.layer = layer
        self.spec = spec
        self._ops = ops
        self._router = rows_matrix(roles, "moe.router", spec.n_experts)
        d_model, dtype, experts = self._router.n_cols, ops.dtype, (spec.n_experts,)
        self._bias = vector(roles, "moe.router_bias", experts, dtype) if spec.router_bias else None
        self._correction = (
            vector(roles, "moe.correction", experts, dtype) if spec.correction else None
        )
        self._shared: _GatedFfn | None = None
        self._shared_gate: Weight | None = None
        if spec.shared_width:
            self._shared = _GatedFfn(roles, "shared", d_model, spec.shared_width, ops)
        if spec.shared_width and spec.shared_gate:
            self._shared_gate = matrix(roles, "shared.gate_inp", 1, d_model)

    def router_part(self) -> Part:
        """Reads ffn_x, writes expert and weight: row r is token r // K, rank r % K."""

        def run(frame: Frame) -> None:
            logits_TE = self._ops.linear(frame["ffn_x"], self._router)
            expert_TK, weight_TK = route(logits_TE, self.spec, self._bias, self._correction)
            n_rows = expert_TK.numel()
            frame["expert"][:n_rows] = expert_TK.flatten()
            frame["weight"][:n_rows] = weight_TK.flatten()

        return Part("router", ("ffn_x",), ("expert", "weight"), run)

    def shared_part(self) -> Part | None:
        """Reads ffn_x, writes shared_out; None when the model has no shared expert."""
        shared, gate = self._shared, self._shared_gate
        if shared is None:
            return None

        def run(frame: Frame) -> None:
            x_TD = frame["ffn_x"]
            y_TD = shared.apply(x_TD)
            if gate is not None:
                y_TD = sigmoid(self._ops.linear(x_TD, gate)) * y_TD
            frame["shared_out"].copy_(y_TD)

        return Part("shared_expert", ("ffn_x",), ("shared_out",), run)


class DenseFfn:
    """Feed-forward without routing. ``roles``: ffn.* as listed in DenseFfnSpec."""

    def __init__(self, layer: int, spec: DenseFfnSpec, roles: Roles, ops: Ops) -> None:
        self.layer = layer
        self.spec = spec
        d_model = rows_matrix(roles, "ffn.gate", spec.width).n_cols
        self._ffn = _GatedFfn(roles, "ffn", d_model, spec.width, ops)

    def part(self) -> Part:
        """Reads ffn_x, writes ffn_out."""

        def run(frame: Frame) -> None:
            frame["ffn_out"].copy_(self._ffn.apply(frame["ffn_x"]))

        return Part("dense_ffn", ("ffn_x",), ("ffn_out",), run)


class _GatedFfn:
    """down( silu(gate x) * up x )."""

    def __init__(self, roles: Roles, prefix: str, d_model: int, width: int, ops: Ops) -> None:
        self._ops = ops
        self._gate = matrix(roles, f"{prefix}.gate", width, d_model)
        self._up = matrix(roles, f"{prefix}.up", width, d_model)
        self._down = matrix(roles, f"{prefix}.down", d_model, width)

    def apply(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        linear = self._ops.linear
        hidden_TF = silu(linear(x_TD, self._gate)) * linear(x_TD, self._up)
        return linear(hidden_TF, self._down)
