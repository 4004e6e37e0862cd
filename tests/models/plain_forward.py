"""A model run layer by layer in plain torch, straight from a checkpoint; no windows.

It checks what a family says about settings and names: the parts are the program's own, in reference
form, and the routed experts are multiplied out of the file's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from strata.formats.checkpoint import open_checkpoint
from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.kernels.linear.ref import linear
from strata.kernels.ops import reference_ops
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState
from strata.models.expert_source import ExpertSource, Proj
from strata.models.moe import MoeFfn
from strata.models.network import Network, build_network
from strata.models.registry import find_family
from strata.models.spec import MoeSpec
from strata.models.weights import load_weights, plan_weights

Kept = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, expert_TK) -> bool [T, K]: which of the rows count; the others are zero."""


def forward(
    path: Path, ids: Sequence[int], dtype: torch.dtype = torch.float64, kept: Kept | None = None
) -> np.ndarray:
    """Logits [T, V] of one sequence, activations in ``dtype``."""
    with open_checkpoint(path) as ckpt:
        family = find_family(ckpt)
        spec = family.spec(ckpt)
        sources, experts = family.sources(ckpt, spec), family.expert_source(ckpt, spec)
        plan_weights(ckpt, spec, sources, experts)
        roles = load_weights(ckpt, spec, sources, copy=False)
        ops = replace(reference_ops(dtype), linear=lambda x, w: linear(x, w, dtype))
        network = build_network(spec, roles, ops, dtype, torch.device("cpu"))
        return _run(network, experts, ids, kept).to(torch.float64).numpy()


def _frame(network: Network, n_tokens: int) -> Frame:
    spec, dtype = network.spec, network.dtype
    wide = BufferSpec((spec.d_model,), dtype)
    buffers = network.buffers() | {
        "shared_out": wide,
        "expert": BufferSpec((), torch.int32, lead="R"),
        "weight": BufferSpec((), dtype, lead="R"),
        "logits": BufferSpec((spec.n_vocab,), dtype),
    }
    for ngram in network.ngrams.values():
        buffers["ngram_rows"] = BufferSpec((ngram.row_width,), dtype)
    state = SequenceState(network.state_specs(), n_tokens, network.device)
    n_active = max(1, network.n_active)
    return Frame(n_tokens, n_active, buffers, {}, state, network.device, keep_inputs=False)


def _run(
    network: Network, experts: ExpertSource, ids: Sequence[int], kept: Kept | None
) -> torch.Tensor:
    frame = _frame(network, len(ids))
    frame.tokens = tuple(ids)
    frame["ids"].copy_(torch.tensor(list(ids)))
    for ngram in network.ngrams.values():
        frame["ngram_rows"].copy_(ngram.rows((), ids))
    residual = network.residual
    residual.embed().run(frame)
    for layer, mixer in enumerate(network.mixers):
        if layer in network.ngrams:
            network.ngrams[layer].part().run(frame)
        parts = [residual.read("attn", layer), *mixer.parts(), residual.write("attn", layer)]
        for part in (*parts, residual.read("ffn", layer)):
            part.run(frame)
        ffn = network.ffns[layer]
        if isinstance(ffn, MoeFfn):
            _moe(frame, ffn, experts, kept)
        else:
            ffn.part().run(frame)
        residual.write("ffn", layer).run(frame)
    residual.head().run(frame)
    network.head_part().run(frame)
    return frame["logits"]


def _moe(frame: Frame, ffn: MoeFfn, experts: ExpertSource, kept: Kept | None) -> None:
    """Every chosen expert on its tokens, weighted, plus the shared expert."""
    ffn.router_part().run(frame)
    shared = ffn.shared_part()
    if shared is not None:
        shared.run(frame)
    x_TD, out_TD = frame["ffn_x"], frame["ffn_out"]
    out_TD.copy_(frame["shared_out"] if shared is not None else torch.zeros_like(out_TD))
    shape = (frame.T, ffn.spec.n_active)
    rows = frame.T * ffn.spec.n_active
    expert_TK, weight_TK = frame["expert"][:rows].view(shape), frame["weight"][:rows].view(shape)
    kept_TK = torch.ones(shape, dtype=torch.bool) if kept is None else kept(ffn.layer, expert_TK)
    for expert in expert_TK.unique().tolist():
        token, rank = ((expert_TK == expert) & kept_TK).nonzero(as_tuple=True)
        y = _expert(x_TD[token], ffn.layer, expert, experts, ffn.spec)
        out_TD.index_add_(0, token, y * weight_TK[token, rank].unsqueeze(-1))


def _expert(
    x: torch.Tensor, layer: int, expert: int, experts: ExpertSource, spec: MoeSpec
) -> torch.Tensor:
    """One expert on some rows, by the formulas of the numerics contract in ``x``'s dtype."""
    types = dict(zip(("gate", "up", "down"), experts.types(layer), strict=True))

    def project(y: torch.Tensor, proj: Proj) -> torch.Tensor:
        rows = experts.rows(layer, expert, proj)
        matrix = torch.from_numpy(dequantize(TYPES[types[proj]], np.ascontiguousarray(rows)))
        y = y @ matrix.to(y.dtype).t() * experts.scale(layer, expert, proj)
        bias = experts.bias(layer, expert, proj)
        return y if bias is None else y + torch.from_numpy(bias).to(y.dtype)

    gate, up = project(x, "gate"), project(x, "up")
    if spec.activation == "silu":
        return project(torch.nn.functional.silu(gate) * up, "down")
    limit = spec.swiglu_limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return project(gate * torch.sigmoid(1.702 * gate) * (up + 1), "down")
