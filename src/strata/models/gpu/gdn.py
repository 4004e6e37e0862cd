"""Gated DeltaNet on the GPU: one launch of products, one of everything between, one product back.

State and letters as in models/gdn. A window leaves the state after all its tokens beside the
committed one; a commit of fewer tokens replays them from the ring and the kept a and b.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strata.kernels.gdn.triton import (
    GdnState,
    GdnWeights,
    replay,
    window,
    workspace_numbers,
)
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import StateSpec
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import Rows, products, row_specs, rows_of
from strata.models.parts import Part
from strata.models.ring import ring_spec
from strata.models.spec import GdnSpec


class GpuGdn:
    """Mixer of one linear-attention layer."""

    def __init__(self, layer: int, spec: GdnSpec, norm_eps: float, roles: GpuRoles) -> None:
        self.layer, self.spec = layer, spec
        self.out_bias: torch.Tensor | None = None
        names = ("gdn.qkv", "gdn.z", "gdn.a", "gdn.b")
        self.inputs = tuple(roles.matrix(name) for name in names)
        self.output = roles.matrix("gdn.out")
        self.weights = GdnWeights(
            roles.vector("gdn.conv").t().contiguous(),
            roles.vector("gdn.decay"),
            roles.vector("gdn.dt_bias"),
            roles.vector("gdn.norm"),
            norm_eps,
            spec.n_k_heads,
            spec.k_dim,
            spec.head_order,
            spec.output_gate,
        )
        self._n_channels = 2 * spec.n_k_heads * spec.k_dim + spec.n_v_heads * spec.v_dim

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Products; a and b are kept until commit."""
        spec, f32 = self.spec, torch.float32
        width = spec.n_v_heads * spec.v_dim
        return {
            "gdn_columns": BufferSpec((self._n_channels,), f32),
            "gdn_z": BufferSpec((width,), f32),
            "gdn_work": BufferSpec((spec.n_v_heads, self.workspace_numbers), f32),
            "gdn_a": BufferSpec((spec.n_v_heads,), f32, per_layer=True),
            "gdn_b": BufferSpec((spec.n_v_heads,), f32, per_layer=True),
        } | row_specs("gdn_y", width)

    @property
    def workspace_numbers(self) -> int:
        """Of a token and head, between the steps of the window's kernel."""
        return workspace_numbers(self.spec.k_dim, self.spec.v_dim)

    def state(self) -> Mapping[str, StateSpec]:
        """Past columns and the recurrent matrices."""
        spec = self.spec
        shape = (spec.n_v_heads, spec.k_dim, spec.v_dim)
        return {
            "conv": ring_spec(spec.conv_taps - 1, self._n_channels, torch.float32),
            "recurrent": StateSpec("recurrent", shape, torch.float32),
        }

    def parts(self) -> tuple[Part, ...]:
        """The steps in order."""
        made = ("gdn_columns", "gdn_z", "gdn_a", "gdn_b")
        return (
            Part("gdn_project", ("x",), made, self._project),
            Part(
                "gdn_window",
                (*made, "conv", "recurrent"),
                ("gdn_y", "gdn_work", "conv", "recurrent"),
                lambda frame: self._run(frame, replayed=False),
            ),
            Part("gdn_out", ("gdn_y",), ("mixer_out",), self._back),
        )

    def replay(self, frame: Frame) -> None:
        """The state after the first n_accepted tokens; nothing for none or all of them."""
        self._run(frame, replayed=True)

    def rewrites(self) -> tuple[str, ...]:
        """What ``rewrite`` writes."""
        return ("gdn_columns", "gdn_a", "gdn_b", "gdn_work", "gdn_y", "conv", "recurrent")

    def rewrite(self, frame: Frame, rows: Rows) -> None:
        """Columns, a, b and the state beside the committed one again, from other rows; the result
        of it is not used."""
        kept = (frame.at(name, self.layer) for name in ("gdn_a", "gdn_b"))
        qkv, _, a, b = self.inputs
        products((qkv, a, b), rows, (frame["gdn_columns"], *kept))
        self._run(frame, replayed=False)

    def _project(self, frame: Frame) -> None:
        outs = (
            frame["gdn_columns"],
            frame["gdn_z"],
            frame.at("gdn_a", self.layer),
            frame.at("gdn_b", self.layer),
        )
        products(self.inputs, rows_of(frame, "x"), outs)

    def _run(self, frame: Frame, replayed: bool) -> None:
        assert isinstance(frame, GpuFrame)
        y = rows_of(frame, "gdn_y")
        quantized = y.q if self.spec.v_dim % 32 == 0 else None
        state = GdnState(
            frame.state.tensor(self.layer, "conv"),
            frame.state.both(self.layer, "recurrent"),
            frame.state.which,
            frame["gdn_work"],
        )
        call, n = (replay, frame.n_accepted) if replayed else (window, frame.n_tokens)
        call(
            frame["gdn_columns"],
            frame["gdn_z"],
            frame.at("gdn_a", self.layer),
            frame.at("gdn_b", self.layer),
            n,
            frame.pos_T,
            state,
            self.weights,
            y.x,
            quantized,
        )

    def _back(self, frame: Frame) -> None:
        fresh = self.spec.v_dim % 32 == 0
        products((self.output,), rows_of(frame, "gdn_y"), (frame["mixer_out"],), fresh=fresh)
