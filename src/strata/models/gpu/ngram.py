"""The n-gram block on the GPU. The host gathers the table's rows before the window starts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strata.kernels.ngram.triton import NgramWeights, ngram
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import StateSpec
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import products, row_specs, rows_of
from strata.models.parts import Part
from strata.models.ring import ring_spec
from strata.models.spec import ModelSpec, NgramSpec


class GpuNgram:
    """The block in front of one layer."""

    def __init__(self, layer: int, spec: NgramSpec, model: ModelSpec, roles: GpuRoles) -> None:
        self.layer, self.spec = layer, spec
        self._wide, self._d_model = model.streams * model.d_model, model.d_model
        self.inputs = (roles.matrix("ngram.key"), roles.matrix("ngram.value"))
        self.weights = NgramWeights(
            roles.vector("ngram.norm_key").flatten(),
            roles.vector("ngram.norm_query").flatten(),
            roles.vector("ngram.norm_conv").flatten(),
            roles.vector("ngram.conv").t().contiguous(),
            spec.dilation,
            model.norm_eps,
        )
        self.row_width = len(spec.head_vocab) * spec.head_dim

    def buffers(self) -> Mapping[str, BufferSpec]:
        """The gathered rows, two products of them, and scratch."""
        f32 = torch.float32
        return row_specs("ngram_rows", self.row_width) | {
            "ngram_key": BufferSpec((self._wide,), f32),
            "ngram_value": BufferSpec((self._d_model,), f32),
            "ngram_scratch": BufferSpec((2 * self._wide,), f32),
        }

    def state(self) -> Mapping[str, StateSpec]:
        """Past inputs of the convolution."""
        n_past = self.spec.dilation * (self.spec.conv_taps - 1)
        return {"ngram_conv": ring_spec(n_past, self._wide, torch.float32)}

    def part(self) -> Part:
        """The one step."""
        reads = ("residual", "ngram_rows", "ngram_conv")
        return Part("ngram", reads, ("residual", "ngram_conv"), self._run)

    def _run(self, frame: Frame) -> None:
        assert isinstance(frame, GpuFrame)
        rows = rows_of(frame, "ngram_rows")
        outs = (frame["ngram_key"], frame["ngram_value"])
        products(self.inputs, rows, outs, fresh=False)
        ngram(
            *outs,
            frame["residual"],
            frame.state.tensor(self.layer, "ngram_conv"),
            frame.pos_T,
            self.weights,
            frame["ngram_scratch"].view(2, frame.T, self._wide),
        )
