"""From a naming to a checkpoint's tables: dense Sources, expert layouts, tensors left aside.

Knows both worlds of names (HF and GGUF) but no single architecture.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import torch

from strata.core.errors import FormatError
from strata.formats.checkpoint import Checkpoint
from strata.models.expert_layouts import (
    PROJS,
    ExpertLayout,
    ExpertSizes,
    FusedGateUp,
    PerExpert,
    Stacked,
)
from strata.models.expert_source import CheckpointExperts
from strata.models.family import gguf_config
from strata.models.names import Naming, sources_of
from strata.models.sources import Rows, Source, Sources, Take, Values
from strata.models.spec import AttentionSpec, ModelSpec, MoeSpec

HF_UNUSED: tuple[tuple[str, str], ...] = (
    (r".*\.rotary_emb\.inv_freq", "rotary frequencies are worked out from the settings"),
    (r"(model\.)?mtp\..*", "draft (multi-token prediction) weights are not used yet"),
    (r"(model\.)?visual\..*", "vision tower: text only"),
)

GGUF_UNUSED: tuple[tuple[str, str], ...] = (
    (r".*\.input_scale", "activation scale of NVFP4: activations get their own scale per block"),
)

DRAFT_LAYER = "draft (multi-token prediction) layer: not used yet"


def hf_sources(
    ckpt: Checkpoint, spec: ModelSpec, naming: Naming, unused: tuple[tuple[str, str], ...] = ()
) -> Sources:
    """Sources in HF names; ``unused`` comes on top of what every family leaves aside."""
    top = hf_top(ckpt)
    roles = sources_of(spec, naming, top, top + "layers.{}.")
    return Sources(roles, unused=HF_UNUSED + unused)


def gguf_sources(ckpt: Checkpoint, spec: ModelSpec, naming: Naming) -> Sources:
    """Sources in GGUF names; query, key and value may lie fused in one tensor."""
    roles = sources_of(spec, naming, "", "blk.{}.")
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, AttentionSpec):
            roles |= _fused_qkv(ckpt, index, layer.mixer)
    return Sources(roles, unused=GGUF_UNUSED + gguf_draft_layers(ckpt, spec))


def _fused_qkv(ckpt: Checkpoint, index: int, mixer: AttentionSpec) -> dict[str, Source]:
    """Query, key and value out of attn_qkv, rows in this order, where the file has it."""
    name, role = f"blk.{index}.attn_qkv.", f"layers.{index}.attn."
    n_kv = mixer.n_kv_heads * mixer.head_dim
    n_q = mixer.n_heads * mixer.head_dim * (2 if mixer.gate else 1)
    cuts = {"q": (0, n_q), "k": (n_q, n_q + n_kv), "v": (n_q + n_kv, n_q + 2 * n_kv)}
    found: dict[str, Source] = {}
    for part, (start, stop) in cuts.items():
        if name + "weight" in ckpt.tensors:
            take = Take(np.arange(start, stop), n_q + 2 * n_kv)
            found[role + part] = Rows((name + "weight",), take)
        if name + "bias" in ckpt.tensors:
            cut = partial(_cut, start=start, stop=stop)
            found[f"{role}{part}_bias"] = Values(name + "bias", cut)
    return found


def _cut(bias: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return bias[start:stop]


def hf_draft_layers(ckpt: Checkpoint, spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """Rules for layers numbered past the trunk, where several families keep their draft layers."""
    return _draft_layers(ckpt, hf_top(ckpt) + "layers.{}.", "eh_proj.weight", spec.n_layers)


def gguf_draft_layers(ckpt: Checkpoint, spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """The same for a GGUF that declares draft layers."""
    if gguf_config(ckpt).count("nextn_predict_layers", default=0) == 0:
        return ()
    return _draft_layers(ckpt, "blk.{}.", "nextn.eh_proj.weight", spec.n_layers)


def _draft_layers(
    ckpt: Checkpoint, layer: str, mark: str, number: int
) -> tuple[tuple[str, str], ...]:
    """One rule a layer from ``number`` on, as long as they have what only draft layers have: a
    trunk layer that the settings forgot must not pass for one."""
    rules: list[tuple[str, str]] = []
    while (prefix := layer.format(number)) + mark in ckpt.tensors:
        rules.append((re.escape(prefix) + ".*", DRAFT_LAYER))
        number += 1
    return tuple(rules)


def expert_sizes(spec: ModelSpec) -> dict[int, ExpertSizes]:
    """Expert sizes of every layer that routes."""
    return {
        index: ExpertSizes(layer.ffn.n_experts, layer.ffn.width, spec.d_model)
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.ffn, MoeSpec)
    }


def experts_from(layouts: dict[int, ExpertLayout], spec: ModelSpec) -> CheckpointExperts:
    """All layers' layouts as one source."""
    counts = [s.E for s in expert_sizes(spec).values()]
    return CheckpointExperts(layouts, max(counts, default=0))


def hf_experts(ckpt: Checkpoint, spec: ModelSpec) -> CheckpointExperts:
    """Experts in whichever of the three layouts lies under "layers.<l>.mlp.experts."."""
    layouts: dict[int, ExpertLayout] = {}
    top = hf_top(ckpt)
    for index, sizes in expert_sizes(spec).items():
        prefix = f"{top}layers.{index}.mlp.experts."
        fused = _either(ckpt, prefix + "gate_up_proj")
        if fused in ckpt.tensors:
            down = _either(ckpt, prefix + "down_proj")
            layouts[index] = FusedGateUp(ckpt, sizes, fused, down)
        elif _either(ckpt, prefix + "gate_proj") in ckpt.tensors:
            names = {p: _either(ckpt, f"{prefix}{p}_proj") for p in PROJS}
            layouts[index] = Stacked(ckpt, sizes, names)
        else:
            _check_count(ckpt, sizes)
            each = {p: f"{prefix}{{}}.{p}_proj.weight" for p in PROJS}
            layouts[index] = PerExpert(ckpt, sizes, each)
    return experts_from(layouts, spec)


def _check_count(ckpt: Checkpoint, sizes: ExpertSizes) -> None:
    """Experts with tensors of their own cannot outnumber the file's tensors."""
    if len(ckpt.tensors) < sizes.E:
        raise FormatError(
            f"{ckpt.path}: {sizes.E} experts a layer cannot be in a file of {len(ckpt.tensors)} "
            f"tensors; settings and weights belong to different models"
        )


def _either(ckpt: Checkpoint, name: str) -> str:
    """The name as it stands, or with .weight behind it if that is how the file has it."""
    return name + ".weight" if name + ".weight" in ckpt.tensors else name


def gguf_experts(ckpt: Checkpoint, spec: ModelSpec) -> CheckpointExperts:
    """Experts of a GGUF: stacked, gate and up apart or fused, with biases where there are some; or
    one tensor per expert, as older converters wrote them."""
    layouts: dict[int, ExpertLayout] = {}
    for index, sizes in expert_sizes(spec).items():
        prefix, ffn = f"blk.{index}.ffn_", spec.layers[index].ffn
        biased = isinstance(ffn, MoeSpec) and ffn.expert_bias
        biases = {p: f"{prefix}{p}_exps.bias" for p in PROJS} if biased else {}
        names = {p: f"{prefix}{p}_exps.weight" for p in PROJS}
        fused = prefix + "gate_up_exps.weight"
        if fused in ckpt.tensors:
            layouts[index] = FusedGateUp(ckpt, sizes, fused, names["down"], biases)
        elif prefix + "gate.0.weight" in ckpt.tensors:
            _check_count(ckpt, sizes)
            each = {p: f"{prefix}{p}.{{}}.weight" for p in PROJS}
            layouts[index] = PerExpert(ckpt, sizes, each)
        else:
            layouts[index] = Stacked(ckpt, sizes, names, biases)
    return experts_from(layouts, spec)


def no_experts(ckpt: Checkpoint, spec: ModelSpec) -> CheckpointExperts:
    """The source of a model without routed experts."""
    return CheckpointExperts({}, 0)


def hf_top(ckpt: Checkpoint) -> str:
    """Prefix of the language model's tensors, which composite checkpoints nest one level deeper."""
    composite = any(name.startswith("model.language_model.") for name in ckpt.tensors)
    return "model.language_model." if composite else "model."
