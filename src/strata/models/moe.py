"""The FFN half of a layer as models see it: router, shared expert, or a dense feed-forward.

Routed experts are not here: a window computes them wherever they lie. This file only says which
experts a token wants and with which weights.
"""

from __future__ import annotations

import torch

from strata.kernels.ops import Ops
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
            expert_R, weight_R = frame["expert"], frame["weight"]
            n = frame.T * self.spec.n_active
            if n != frame.R:
                expert_R, weight_R = expert_R[:n], weight_R[:n]
            self._ops.route(logits_TE, self.spec, self._bias, self._correction, expert_R, weight_R)

        return Part("router", ("ffn_x",), ("expert", "weight"), run)

    def shared_part(self) -> Part | None:
        """Reads ffn_x, writes shared_out; None when the model has no shared expert."""
        shared, gate = self._shared, self._shared_gate
        if shared is None:
            return None

        def run(frame: Frame) -> None:
            gate_T1 = shared.apply(frame["ffn_x"], frame["shared_out"], gate)
            if gate_T1 is not None:
                self._ops.sigmoid_times(frame["shared_out"], gate_T1)

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
            self._ffn.apply(frame["ffn_x"], frame["ffn_out"])

        return Part("dense_ffn", ("ffn_x",), ("ffn_out",), run)


class _GatedFfn:
    """down( silu(gate x) * up x )."""

    def __init__(self, roles: Roles, prefix: str, d_model: int, width: int, ops: Ops) -> None:
        self._ops = ops
        self._gate = matrix(roles, f"{prefix}.gate", width, d_model)
        self._up = matrix(roles, f"{prefix}.up", width, d_model)
        self._down = matrix(roles, f"{prefix}.down", d_model, width)

    def apply(
        self, x_TD: torch.Tensor, out_TD: torch.Tensor, beside: Weight | None = None
    ) -> torch.Tensor | None:
        """Fill out; returns another product of x, [T, beside.n_rows], if one is asked for."""
        ops, n_tokens = self._ops, x_TD.shape[0]
        gate_TF = x_TD.new_empty(n_tokens, self._gate.n_rows)
        up_TF = torch.empty_like(gate_TF)
        other = None
        if beside is None:
            ops.linears(x_TD, (self._gate, self._up), (gate_TF, up_TF))
        else:
            other = x_TD.new_empty(n_tokens, beside.n_rows)
            ops.linears(x_TD, (self._gate, self._up, beside), (gate_TF, up_TF, other))
        ops.silu_times(gate_TF, up_TF)
        ops.linears(gate_TF, (self._down,), (out_TD,))
        return other
