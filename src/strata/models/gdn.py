"""Gated DeltaNet as a mixer: projections, short convolution, delta rule, gated norm, output.

Knows no windows. Letters: N conv channels [q | k | v], P conv taps, J value heads, H key heads,
K key dim, V value dim.
State: "conv", a ring of the columns before the convolution, and "recurrent", one [K, V] matrix per
value head. A window reads the committed matrix and leaves the one after all its tokens beside it;
commit takes that one, or replays fewer tokens from the kept inputs with the same op, so both have
the bits of a window of exactly n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from strata.kernels.gdn import ConvWeights
from strata.kernels.ops import Ops
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec
from strata.models.parts import Part
from strata.models.ring import assert_can_cut_back, ring_spec
from strata.models.roles import Roles, matrix, vector
from strata.models.spec import GdnSpec

_KEPT = ("gdn_q", "gdn_k", "gdn_v", "gdn_keep", "gdn_beta")


class Gdn:
    """Mixer of one linear-attention layer. ``roles``: gdn.* as listed in GdnSpec."""

    def __init__(
        self,
        layer: int,
        spec: GdnSpec,
        d_model: int,
        norm_eps: float,
        roles: Roles,
        ops: Ops,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.ops = ops
        self._eps = norm_eps
        self._k_width = spec.n_k_heads * spec.k_dim
        self._v_width = spec.n_v_heads * spec.v_dim
        self._n_channels = 2 * self._k_width + self._v_width
        self._qkv = matrix(roles, "gdn.qkv", self._n_channels, d_model)
        self._z = matrix(roles, "gdn.z", self._v_width, d_model)
        self._a = matrix(roles, "gdn.a", spec.n_v_heads, d_model)
        self._b = matrix(roles, "gdn.b", spec.n_v_heads, d_model)
        self._out = matrix(roles, "gdn.out", d_model, self._v_width)
        taps_NP = vector(roles, "gdn.conv", (self._n_channels, spec.conv_taps), ops.dtype)
        self._conv = ConvWeights(
            taps_NP.t().contiguous(),
            vector(roles, "gdn.decay", (spec.n_v_heads,), ops.dtype),
            vector(roles, "gdn.dt_bias", (spec.n_v_heads,), ops.dtype),
            spec.n_k_heads,
            spec.n_v_heads,
            spec.k_dim,
            spec.v_dim,
        )
        self._norm_V = vector(roles, "gdn.norm", (spec.v_dim,), ops.dtype)
        self._key_head_J = _key_heads(spec).to(taps_NP.device)

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Projections, and the inputs of the recurrence, which are kept until commit."""
        spec, dtype = self.spec, self.ops.dtype
        return {
            "gdn_columns": BufferSpec((self._n_channels,), dtype),
            "gdn_z": BufferSpec((spec.n_v_heads, spec.v_dim), dtype),
            "gdn_a": BufferSpec((spec.n_v_heads,), dtype),
            "gdn_b": BufferSpec((spec.n_v_heads,), dtype),
            "gdn_o": BufferSpec((spec.n_v_heads, spec.v_dim), dtype),
            "gdn_q": BufferSpec((spec.n_k_heads, spec.k_dim), dtype, per_layer=True),
            "gdn_k": BufferSpec((spec.n_k_heads, spec.k_dim), dtype, per_layer=True),
            "gdn_v": BufferSpec((spec.n_v_heads, spec.v_dim), dtype, per_layer=True),
            "gdn_keep": BufferSpec((spec.n_v_heads,), dtype, per_layer=True),
            "gdn_beta": BufferSpec((spec.n_v_heads,), dtype, per_layer=True),
        }

    def state(self) -> Mapping[str, StateSpec]:
        """Past columns and the recurrent matrices."""
        spec, dtype = self.spec, self.ops.dtype
        return {
            "conv": ring_spec(spec.conv_taps - 1, self._n_channels, dtype),
            "recurrent": StateSpec("recurrent", (spec.n_v_heads, spec.k_dim, spec.v_dim), dtype),
        }

    def parts(self) -> tuple[Part, ...]:
        """The steps in order."""
        projected = ("gdn_columns", "gdn_z", "gdn_a", "gdn_b")
        conv_reads = ("gdn_columns", "gdn_a", "gdn_b", "conv")
        return (
            Part("gdn_project", ("x",), projected, self._project),
            Part("gdn_conv", conv_reads, (*_KEPT, "conv"), self._convolve),
            Part("gdn_recurrence", (*_KEPT, "recurrent"), ("gdn_o", "recurrent"), self._recur),
            Part("gdn_out", ("gdn_o", "gdn_z"), ("mixer_out",), self._finish),
        )

    def commit(self, frame: Frame, n: int) -> None:
        """Advance the recurrent matrices by the window's first n tokens; the ring needs nothing."""
        assert 0 <= n <= frame.T, f"cannot commit {n} of {frame.T} tokens"
        if n == 0:
            return
        if n < frame.T or self.layer in frame.rewritten:
            assert frame.keep_inputs, "only a window that keeps its inputs can be committed in part"
            self.advance(frame.state, [kept[:n] for kept in self.kept(frame)])
        else:
            frame.state.flip(self.layer, "recurrent")

    def kept(self, frame: Frame) -> Sequence[torch.Tensor]:
        """q, k, v, keep and beta of every token of the window."""
        return [frame.at(name, self.layer) for name in _KEPT]

    def rewrite(
        self, state: SequenceState, start: int, x_nD: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> None:
        """Columns and the recurrence's inputs again (all channels of the convolution, a and b)."""
        n, n_heads = x_nD.shape[0], self.spec.n_v_heads
        columns, a, b = (x_nD.new_empty(n, w) for w in (self._n_channels, n_heads, n_heads))
        self.ops.linears(x_nD, (self._qkv, self._a, self._b), (columns, a, b))
        ring = state.tensor(self.layer, "conv")
        self.ops.gdn_inputs(ring, start, columns, a, b, self._conv, kept)

    def advance(self, state: SequenceState, kept: Sequence[torch.Tensor]) -> None:
        """The recurrent matrices after the tokens of ``kept``."""
        self._recurrence(state, kept, None)
        state.flip(self.layer, "recurrent")

    def _project(self, frame: Frame) -> None:
        outs = (frame["gdn_columns"], frame["gdn_z"], frame["gdn_a"], frame["gdn_b"])
        self.ops.linears(frame["x"], (self._qkv, self._z, self._a, self._b), outs)

    def _convolve(self, frame: Frame) -> None:
        assert_can_cut_back(frame)
        self.ops.gdn_inputs(
            frame.state.tensor(self.layer, "conv"),
            frame.start,
            frame["gdn_columns"],
            frame["gdn_a"],
            frame["gdn_b"],
            self._conv,
            self.kept(frame),
        )

    def _recur(self, frame: Frame) -> None:
        self._recurrence(frame.state, self.kept(frame), frame["gdn_o"])

    def _recurrence(
        self, state: SequenceState, kept: Sequence[torch.Tensor], out: torch.Tensor | None
    ) -> None:
        """The rule over the kept inputs, from the committed state into the copy beside it."""
        q, k, v, keep, beta = kept
        self.ops.gdn_recurrence(
            q,
            k,
            v,
            keep,
            beta,
            self._key_head_J,
            state.front(self.layer, "recurrent"),
            state.back(self.layer, "recurrent"),
            out,
        )

    def _finish(self, frame: Frame) -> None:
        y_TJV = self.ops.gated_norm(
            frame["gdn_o"], frame["gdn_z"], self._norm_V, self._eps, self.spec.output_gate
        )
        self.ops.linears(y_TJV.flatten(1), (self._out,), (frame["mixer_out"],))


def _key_heads(spec: GdnSpec) -> torch.Tensor:
    """Key head of each value head, int32 [J]."""
    value_head = torch.arange(spec.n_v_heads, dtype=torch.int32)
    if spec.head_order == "grouped":
        return value_head // (spec.n_v_heads // spec.n_k_heads)
    return value_head % spec.n_k_heads
