"""A network put together from its spec: residual, mixers, n-gram blocks, FFN halves and head, ready
to hand out parts.

Knows no windows, places or graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from strata.kernels.ops import Ops
from strata.kernels.weight import Weight
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import StateSpec
from strata.models.attention import Attention
from strata.models.gdn import Gdn
from strata.models.mla import Mla
from strata.models.moe import DenseFfn, MoeFfn
from strata.models.ngram import Ngram
from strata.models.parts import Mixer, Part
from strata.models.residual import Residual, build_residual
from strata.models.spec import AttentionSpec, GdnSpec, MlaSpec, ModelSpec, MoeSpec

Roles = Mapping[str, Weight | torch.Tensor]

__all__ = ["DenseFfn", "MoeFfn", "Network", "build_network"]


@dataclass(frozen=True)
class Network:
    """All parts of one model. ``dtype`` is that of activations and streams."""

    spec: ModelSpec
    ops: Ops
    residual: Residual
    mixers: tuple[Mixer, ...]
    ffns: tuple[MoeFfn | DenseFfn, ...]
    ngrams: Mapping[int, Ngram]
    head: Weight
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Activations and residual streams."""
        return self.ops.dtype

    @property
    def n_active(self) -> int:
        """K: routed experts per token (the most of any layer); 0 in a dense model."""
        return max((f.spec.n_active for f in self.ffns if isinstance(f, MoeFfn)), default=0)

    def buffers(self) -> dict[str, BufferSpec]:
        """Window buffers of all parts by name."""
        found: dict[str, BufferSpec] = dict(self.residual.buffers())
        for mixer in self.mixers:
            found |= mixer.buffers()
        return found

    def buffer_layers(self) -> dict[str, tuple[int, ...]]:
        """Layers that own a copy of each per-layer buffer."""
        layers: dict[str, list[int]] = {}
        for layer, mixer in enumerate(self.mixers):
            for name, spec in mixer.buffers().items():
                if spec.per_layer:
                    layers.setdefault(name, []).append(layer)
        return {name: tuple(at) for name, at in layers.items()}

    def state_specs(self) -> list[dict[str, StateSpec]]:
        """State of each layer by name."""
        specs = [dict(mixer.state()) for mixer in self.mixers]
        for layer, ngram in self.ngrams.items():
            specs[layer] |= ngram.state()
        return specs

    def owned_names(self) -> set[str]:
        """Names that exist once per layer: state and kept inputs."""
        names = {name for group in self.state_specs() for name in group}
        return names | set(self.buffer_layers())

    def head_part(self) -> Part:
        """Logits of the window's last n_head positions."""

        def run(frame: Frame) -> None:
            x = frame["head_x"][frame.T - frame.n_head :]
            if frame.n_head:
                self.ops.linears(x, (self.head,), (frame["logits"],))

        return Part("head", ("head_x",), ("logits",), run)


def build_network(
    spec: ModelSpec, roles: Roles, ops: Ops, kv_dtype: torch.dtype, device: torch.device
) -> Network:
    """Build every part from the loaded weights (role name -> Weight or f32 tensor)."""
    mixers: list[Mixer] = []
    ffns: list[MoeFfn | DenseFfn] = []
    ngrams: dict[int, Ngram] = {}
    for index, layer in enumerate(spec.layers):
        own = _layer_roles(roles, index)
        mixer = layer.mixer
        if isinstance(mixer, GdnSpec):
            mixers.append(Gdn(index, mixer, spec.d_model, spec.norm_eps, own, ops))
        elif isinstance(mixer, MlaSpec):
            mixers.append(Mla(index, mixer, spec.d_model, spec.norm_eps, own, ops, kv_dtype))
        elif isinstance(mixer, AttentionSpec):
            mixers.append(Attention(index, mixer, spec.d_model, spec.norm_eps, own, ops, kv_dtype))
        if isinstance(layer.ffn, MoeSpec):
            ffns.append(MoeFfn(index, layer.ffn, own, ops))
        else:
            ffns.append(DenseFfn(index, layer.ffn, own, ops))
        if layer.ngram is not None:
            ngrams[index] = Ngram(index, layer.ngram, spec, own, ops)
    head = roles["embed"] if spec.tied_head else roles["head"]
    assert isinstance(head, Weight)
    residual = build_residual(spec, roles, ops)
    return Network(spec, ops, residual, tuple(mixers), tuple(ffns), ngrams, head, device)


def _layer_roles(roles: Roles, index: int) -> dict[str, Weight | torch.Tensor]:
    prefix = f"layers.{index}."
    return {k[len(prefix) :]: v for k, v in roles.items() if k.startswith(prefix)}
