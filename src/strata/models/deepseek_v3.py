"""DeepSeek-V3: latent attention, leading dense layers, sigmoid router that chooses in groups.

The rotary part of a head pairs neighbouring dims. With YaRN the softmax scale carries mscale
squared. GGUF files (llama.cpp architecture ``deepseek2``) hold the up-projection of keys transposed
per head, older ones hold it whole as HF does. Sources: transformers ``models/deepseek_v3``;
llama.cpp ``src/models/deepseek2.cpp``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from strata.formats.checkpoint import Checkpoint
from strata.models.config import Config
from strata.models.family import (
    Dialect,
    Family,
    gguf_config,
    gguf_trunk,
    hf_config,
    hf_trunk,
)
from strata.models.family_parts import (
    SIGMOID,
    SOFTMAX,
    gguf_sigmoid_moe,
    hf_sigmoid_moe,
    leading_dense,
)
from strata.models.names import GGUF, HF, HF_SHARED_EXPERTS, Naming
from strata.models.rope_config import (
    Defaults,
    gguf_rotary,
    hf_rope_section,
    hf_rope_type,
    hf_rotary,
    yarn_factor,
)
from strata.models.rotary import Pairing, yarn_mscale
from strata.models.sources import Rows, Source, Sources, Take, Values
from strata.models.spec import MlaSpec, ModelSpec, MoeSpec
from strata.models.tables import (
    gguf_experts,
    gguf_sources,
    hf_draft_layers,
    hf_experts,
    hf_sources,
)

_HF_NAMES: Naming = {
    **HF,
    **HF_SHARED_EXPERTS,
    "mla.q": "self_attn.q_proj.weight",
    "mla.q_a": "self_attn.q_a_proj.weight",
    "mla.q_a_norm": "self_attn.q_a_layernorm.weight",
    "mla.q_b": "self_attn.q_b_proj.weight",
    "mla.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "mla.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "mla.o": "self_attn.o_proj.weight",
}
_GGUF_NAMES: Naming = {
    **GGUF,
    "mla.q": "attn_q.weight",
    "mla.q_a": "attn_q_a.weight",
    "mla.q_a_norm": "attn_q_a_norm.weight",
    "mla.q_b": "attn_q_b.weight",
    "mla.kv_a": "attn_kv_a_mqa.weight",
    "mla.kv_a_norm": "attn_kv_a_norm.weight",
    "mla.v_b": lambda prefix: Rows((prefix + "attn_v_b.weight",)),
    "mla.o": "attn_output.weight",
}


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("attention_bias", False)
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    config.require("moe_layer_freq", 1)
    rope_dim, nope_dim = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    pairing: Pairing = "pairs" if config.flag("rope_interleave", True) else "half"
    mixer = MlaSpec(
        n_heads=trunk.n_heads,
        q_lora_rank=config.size("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_lora_rank=config.size("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.size("v_head_dim"),
        rotary=hf_rotary(config, rope_dim, Defaults(), pairing),
        scale=(nope_dim + rope_dim) ** -0.5 * _hf_mscale(config) ** 2,
    )
    moe = hf_sigmoid_moe(config)
    n_dense = config.count("first_k_dense_replace", default=3)
    width = config.size("intermediate_size")
    return trunk.spec("deepseek_v3", leading_dense(trunk, mixer, moe, n_dense, width))


def _hf_mscale(config: Config) -> float:
    """YaRN's share of the softmax scale, before squaring."""
    rope = hf_rope_section(config)
    all_dims = rope.number("mscale_all_dim", default=0.0)
    if hf_rope_type(rope) == "default" or all_dims == 0:
        return 1.0
    return yarn_mscale(yarn_factor(config, rope), all_dims)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    key_dim = meta.size("attention.key_length_mla", "attention.key_length")
    rope_dim = meta.size("rope.dimension_count")
    if rope_dim >= key_dim:
        raise meta.unsupported("rope.dimension_count", rope_dim, f"less than the key's {key_dim}")
    # the converter stores a tenth of mscale_all_dim, and mscale is taken to be equal to it
    mscale = 10 * meta.number("rope.scaling.yarn_log_multiplier", default=0.0) or None
    factor = meta.number("rope.scaling.factor", default=1.0)
    mixer = MlaSpec(
        n_heads=trunk.n_heads,
        q_lora_rank=meta.size("attention.q_lora_rank") if _has_q_lora(ckpt) else None,
        kv_lora_rank=meta.size("attention.kv_lora_rank"),
        nope_dim=key_dim - rope_dim,
        rope_dim=rope_dim,
        v_dim=meta.size("attention.value_length_mla", "attention.value_length"),
        rotary=gguf_rotary(meta, rope_dim, "pairs", mscale=mscale),
        scale=key_dim**-0.5 * (yarn_mscale(factor, mscale) ** 2 if mscale else 1.0),
    )
    n_dense = meta.count("leading_dense_block_count", default=0)
    width = meta.size("feed_forward_length")
    moe = _gguf_moe(ckpt, meta, n_dense)
    return trunk.spec("deepseek_v3", leading_dense(trunk, mixer, moe, n_dense, width))


def _has_q_lora(ckpt: Checkpoint) -> bool:
    return "blk.0.attn_q_a.weight" in ckpt.tensors


def _gguf_moe(ckpt: Checkpoint, meta: Config, n_dense: int) -> MoeSpec:
    """V3's router; the softmax router of V2 without groups also comes under this architecture."""
    meta.require("expert_gating_func", SOFTMAX, SIGMOID)
    moe = gguf_sigmoid_moe(meta)
    if meta.get("expert_gating_func") == SIGMOID:
        return replace(moe, correction=f"blk.{n_dense}.exp_probs_b.bias" in ckpt.tensors)
    if moe.n_groups > 1:
        raise meta.unsupported("expert_group_count", moe.n_groups, "1 with softmax gating")
    return replace(moe, scoring="softmax", correction=False)


def _kv_b(mixer: MlaSpec, tensor: str) -> tuple[Source, Source]:
    """(k_b, v_b) out of a tensor whose rows are [nope | v] head by head."""
    per_head = mixer.nope_dim + mixer.v_dim
    rows = np.arange(mixer.n_heads * per_head).reshape(mixer.n_heads, per_head)
    key, value = rows[:, : mixer.nope_dim], rows[:, mixer.nope_dim :]
    return (
        Rows((tensor,), Take(key.reshape(-1), rows.size)),
        Rows((tensor,), Take(value.reshape(-1), rows.size)),
    )


def _untransposed(k_b_Hcp: torch.Tensor) -> torch.Tensor:
    """[H, kv_lora, nope] as [H * nope, kv_lora]."""
    return k_b_Hcp.transpose(1, 2).flatten(0, 1)


def _hf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    table = hf_sources(ckpt, spec, _HF_NAMES, hf_draft_layers(ckpt, spec))
    split: dict[str, Source] = {}
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, MlaSpec)
        name, role = f"model.layers.{index}.self_attn.kv_b_proj.weight", f"layers.{index}.mla."
        split[role + "k_b"], split[role + "v_b"] = _kv_b(layer.mixer, name)
    return replace(table, roles={**table.roles, **split})


def _gguf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    table = gguf_sources(ckpt, spec, _GGUF_NAMES)
    own: dict[str, Source] = {}
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, MlaSpec)
        role, whole = f"layers.{index}.mla.", f"blk.{index}.attn_kv_b.weight"
        if whole in ckpt.tensors:
            own[role + "k_b"], own[role + "v_b"] = _kv_b(layer.mixer, whole)
        else:
            own[role + "k_b"] = Values(f"blk.{index}.attn_k_b.weight", _untransposed)
    return replace(table, roles={**table.roles, **own})


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    gguf_names=("deepseek2",),
    hf=Dialect(_hf_spec, _hf_sources, hf_experts),
    gguf=Dialect(_gguf_spec, _gguf_sources, gguf_experts),
)
