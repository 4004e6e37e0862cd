"""Reads prompts on tensor cores (``--numerics fast``): a whole chunk through layer after layer.

Experts come as in ``window/device_chunk.py``: each layer's are copied to the device once. The sums
have another order than those of windows, so the same text read in windows, or cut elsewhere, gives
other last bits; everything that decodes afterwards keeps its own order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strata.experts.prompt_experts import PromptExperts
from strata.kernels.combine.triton import combine
from strata.kernels.embed.triton import lookup
from strata.kernels.expert_rows.triton_gemm import expert_rows_many, groups_of_rows
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.triton_gemm import half_rows, new_half_rows
from strata.kernels.rms_norm.triton import Pending
from strata.kernels.router import route_rows
from strata.models.gpu import many
from strata.models.gpu.attention import GpuAttention
from strata.models.gpu.ffn import GpuMoe
from strata.models.gpu.frame import DeviceState
from strata.models.gpu.gdn import GpuGdn
from strata.models.gpu.network import GpuNetwork


def can_read(network: GpuNetwork) -> bool:
    """Whether every mixer has a form for many tokens."""
    return all(isinstance(mixer, GpuGdn | GpuAttention) for mixer in network.mixers)


def _kind(network: GpuNetwork, layer: int) -> str:
    """Equal for layers that launch the same kernels."""
    residual = network.residual
    parts = (
        network.mixers[layer], network.ffns[layer], network.ngrams.get(layer),
        residual.reader("attn", layer), residual.reader("ffn", layer),
    )  # fmt: skip
    return "; ".join(
        f"{type(part).__name__} {getattr(part, 'spec', '')} {_matrices(part)}" for part in parts
    )


def _matrices(part: object) -> list[str]:
    """Types and sizes of the matrices that an object holds, in lists and in objects of its own."""
    if isinstance(part, GpuWeight):
        return [f"{part.type} {part.n_rows} x {part.n_cols}"]
    held = part if isinstance(part, list | tuple) else getattr(part, "__dict__", {}).values()
    return [text for one in held for text in _matrices(one)]


class FastReader:
    """Reads chunks of any length."""

    piece = 1

    def __init__(self, network: GpuNetwork, state: DeviceState, experts: PromptExperts) -> None:
        self._net, self._state, self.experts = network, state, experts
        self._kinds = [_kind(network, layer) for layer in range(network.spec.n_layers)]

    def read(self, tokens: Sequence[int], n_head: int) -> torch.Tensor:
        """Commit the tokens; logits f32 [n_head, V] of the last, on the host. ContextLengthError
        before any work."""
        net, state = self._net, self._state
        state.require_room(len(tokens))
        device, start, n = net.device, state.length, len(tokens)
        ids = torch.tensor(tokens, dtype=torch.int64).to(device)
        pos = torch.arange(start, start + n, dtype=torch.int32).to(device)
        rows = [r(state.tokens, tokens).to(device) for r in net.ngram_rows.values()]
        chunk = many.Chunk(pos, state)
        count, width = net.spec.streams, net.spec.d_model
        shape = (n, width) if count == 1 else (n, count, width)
        streams = torch.empty(shape, dtype=torch.float32, device=device)
        with self.experts.reading(n, "fast", self._kinds):
            lookup(net.residual.table, ids, streams)
            for layer in range(net.spec.n_layers):
                if layer in net.ngrams:
                    many.ngram_block(net.ngrams[layer], rows[0], streams, chunk)
                self._layer(layer, streams, chunk)
        state.settle()
        state.tokens.extend(tokens)
        if n_head == 0:
            return torch.empty(0, net.spec.n_vocab)
        head_x = many.head_read(net.residual, streams[n - n_head :])
        return many.product(head_x, net.final)[0].cpu()

    def _layer(self, layer: int, streams: torch.Tensor, chunk: many.Chunk) -> None:
        net = self._net
        mixer, ffn = net.mixers[layer], net.ffns[layer]
        self.experts.begun(layer)
        x, coeff = many.read(net.residual, "attn", layer, streams)
        mix = many.gdn if isinstance(mixer, GpuGdn) else many.attend
        out = mix(mixer, x, chunk)  # type: ignore[arg-type]
        pending = Pending(out, coeff, mixer.out_bias)
        x, coeff = many.read(net.residual, "ffn", layer, streams, pending)
        if isinstance(ffn, GpuMoe):
            self._moe(layer, ffn, x, coeff, streams)
        else:
            net.residual.add(streams, Pending(many.gated(ffn.gated, x), coeff))

    def _moe(
        self,
        layer: int,
        ffn: GpuMoe,
        x_ND: torch.Tensor,
        coeff: torch.Tensor | None,
        streams: torch.Tensor,
    ) -> None:
        n, k = len(x_ND), ffn.spec.n_active
        weights = [ffn.router] if ffn.shared_gate is None else [ffn.router, ffn.shared_gate]
        made = many.product(x_ND, *weights)
        expert_R = torch.empty(n * k, dtype=torch.int32, device=x_ND.device)
        weight_R = x_ND.new_empty(n * k)
        route_rows(made[0], ffn.spec, ffn.bias, ffn.correction, expert_R, weight_R)
        expert, addresses = self.experts.service.shown(layer)
        groups = groups_of_rows(expert_R, k, addresses)
        self.experts.routed(layer, x_ND, groups)
        half = new_half_rows(n, x_ND.shape[1], x_ND.device)
        half_rows(x_ND, half)
        h = x_ND.new_empty(n * k, expert.d_expert)
        h_half = new_half_rows(n * k, expert.d_expert, x_ND.device)
        rows = x_ND.new_empty(n * k, x_ND.shape[1])
        shared = None if ffn.shared is None else many.gated(ffn.shared, x_ND)
        self.experts.start(layer)
        with self.experts.own_rows(layer):
            expert_rows_many(expert, groups, half, h, h_half, rows)
        self.experts.joined(layer, rows)
        combine(
            rows, weight_R, n, shared_TD=shared,
            shared_gate_T=made[1].view(-1) if len(made) > 1 else None,
            residual=streams, coeff_TC=coeff,
        )  # fmt: skip
