"""A network on the GPU, put together from its spec and the weights in device memory.

Knows no windows, places or graphs. It has the sizes and state of models/network and launches
kernels where that one calls operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.sample.triton import Scratch, choose, n_pieces
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import StateSpec
from strata.models.gpu.attention import GpuAttention
from strata.models.gpu.ffn import GpuDense, GpuMoe
from strata.models.gpu.frame import DeviceState, GpuFrame
from strata.models.gpu.gdn import GpuGdn
from strata.models.gpu.mla import GpuMla
from strata.models.gpu.ngram import GpuNgram
from strata.models.gpu.residual import GpuResidual
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import products, rows_of
from strata.models.parts import Part
from strata.models.spec import AttentionSpec, GdnSpec, ModelSpec, MoeSpec

GpuMixer = GpuAttention | GpuGdn | GpuMla
NgramRows = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""(previous tokens, tokens) -> rows f32 [T, width] on the host."""


@dataclass(frozen=True)
class GpuNetwork:
    """All parts of one model. ngram_rows: gathers what each n-gram block reads, by layer."""

    spec: ModelSpec
    residual: GpuResidual
    mixers: tuple[GpuMixer, ...]
    ffns: tuple[GpuMoe | GpuDense, ...]
    ngrams: Mapping[int, GpuNgram]
    ngram_rows: Mapping[int, NgramRows]
    final: GpuWeight
    device: torch.device

    @cached_property
    def n_active(self) -> int:
        """K: routed experts per token (the most of any layer); 0 in a dense model."""
        return max((f.spec.n_active for f in self.ffns if isinstance(f, GpuMoe)), default=0)

    def buffers(self) -> dict[str, BufferSpec]:
        """Window buffers of all parts by name."""
        spec = self.spec
        found = dict(self.residual.buffers())
        for part in (*self.mixers, *self.ffns, *self.ngrams.values()):
            found |= part.buffers()
        found["logits"] = BufferSpec((spec.n_vocab,), torch.float32)
        pieces = n_pieces(spec.n_vocab)
        found |= {
            "choice": BufferSpec((2,), torch.int32),
            "choice_best": BufferSpec((pieces,), torch.int64),
            "choice_bad": BufferSpec((pieces,), torch.int32),
            "choice_done": BufferSpec((), torch.int32),
        }
        if self.n_active:
            found |= {
                "expert": BufferSpec((), torch.int32, lead="R"),
                "weight": BufferSpec((), torch.float32, lead="R"),
                "place": BufferSpec((), torch.int8, lead="R"),
                "rows": BufferSpec((spec.d_model,), torch.float32, lead="R"),
            }
        return found

    def state_specs(self) -> list[dict[str, StateSpec]]:
        """State of each layer by name."""
        specs = [dict(mixer.state()) for mixer in self.mixers]
        for layer, ngram in self.ngrams.items():
            specs[layer] |= ngram.state()
        return specs

    def owned_names(self) -> set[str]:
        """Names that exist once per layer: state and kept inputs."""
        kept = {n for m in self.mixers for n, s in m.buffers().items() if s.per_layer}
        return kept | {name for group in self.state_specs() for name in group}

    def new_frame(self, n_tokens: int, state: DeviceState) -> GpuFrame:
        """Buffers for windows of n_tokens tokens."""
        layers: dict[str, list[int]] = {}
        for layer, mixer in enumerate(self.mixers):
            for name, spec in mixer.buffers().items():
                if spec.per_layer:
                    layers.setdefault(name, []).append(layer)
        owners = {name: tuple(at) for name, at in layers.items()}
        k = max(self.n_active, 1)
        return GpuFrame(n_tokens, k, self.buffers(), owners, state, self.device)

    def head_part(self) -> Part:
        """Logits of every position of the window."""

        def run(frame: Frame) -> None:
            products((self.final,), rows_of(frame, "head_x"), (frame["logits"],))

        return Part("head", ("head_x",), ("logits",), run)

    def choose_part(self) -> Part:
        """The highest logit of every position, and how many are not finite: int32 [T, 2]."""

        def run(frame: Frame) -> None:
            scratch = Scratch(frame["choice_best"], frame["choice_bad"], frame["choice_done"])
            choose(frame["logits"], scratch, frame["choice"])

        return Part("choose", ("logits",), ("choice",), run)


def build_gpu_network(
    spec: ModelSpec,
    roles: GpuRoles,
    kv_dtype: torch.dtype,
    context_tokens: int,
    device: torch.device,
    ngram_rows: Mapping[int, NgramRows],
) -> GpuNetwork:
    """Build every part."""
    mixers: list[GpuMixer] = []
    ffns: list[GpuMoe | GpuDense] = []
    ngrams: dict[int, GpuNgram] = {}
    for index, layer in enumerate(spec.layers):
        own, mixer = roles.layer(index), layer.mixer
        if isinstance(mixer, GdnSpec):
            mixers.append(GpuGdn(index, mixer, spec.norm_eps, own))
        elif isinstance(mixer, AttentionSpec):
            mixers.append(
                GpuAttention(index, mixer, spec.norm_eps, own, kv_dtype, context_tokens, device)
            )
        else:
            mixers.append(
                GpuMla(index, mixer, spec.norm_eps, own, kv_dtype, context_tokens, device)
            )
        if isinstance(layer.ffn, MoeSpec):
            ffns.append(GpuMoe(index, layer.ffn, own))
        else:
            ffns.append(GpuDense(index, layer.ffn, own))
        if layer.ngram is not None:
            ngrams[index] = GpuNgram(index, layer.ngram, spec, own)
    final = roles.matrix("embed" if spec.tied_head else "head")
    residual = GpuResidual(spec, roles)
    return GpuNetwork(
        spec, residual, tuple(mixers), tuple(ffns), ngrams, dict(ngram_rows), final, device
    )
