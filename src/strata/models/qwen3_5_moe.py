"""Qwen3.5-MoE: Qwen3-Next with the DeltaNet projections apart, often inside a composite.

GGUF files lay the value heads out so that value head i uses key head i mod n; HF groups them by key
head. The interleaved three-axis rotary positions are ordinary ones for text. Sources: transformers
``models/qwen3_5_moe``; llama.cpp architecture ``qwen35moe``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from strata.formats.checkpoint import Checkpoint
from strata.models.family import (
    Dialect,
    Family,
    gguf_config,
    gguf_trunk,
    hf_config,
    hf_trunk,
)
from strata.models.family_parts import (
    gguf_gdn,
    gguf_recurrent,
    gguf_rotary_dims,
    gguf_shared_width,
    gguf_softmax_moe,
    gqa,
    hf_gdn,
    hf_recurrent,
    hf_softmax_moe,
)
from strata.models.names import GGUF, HF, HF_CENTERED, HF_GDN
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.spec import LayerSpec, ModelSpec
from strata.models.tables import gguf_experts, gguf_sources, hf_experts, hf_sources


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("attention_bias", False)
    config.require("attn_output_gate", True)
    config.require("mlp_only_layers", [])
    rotary = hf_rotary(config, trunk.head_dim, Defaults(partial=0.25))
    attention = replace(gqa(trunk, rotary), qk_norm=True, gate=True)
    gdn = hf_gdn(config, "silu")
    moe = hf_softmax_moe(config, True, config.size("shared_expert_intermediate_size"))
    recurrent = hf_recurrent(config, trunk, ("full_attention",))
    return trunk.spec("qwen3_5_moe", [LayerSpec(gdn if r else attention, moe) for r in recurrent])


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk))
    attention = replace(gqa(trunk, rotary), qk_norm=True, gate=True)
    gdn = gguf_gdn(meta, "interleaved", "silu")
    moe = gguf_softmax_moe(meta, True, gguf_shared_width(ckpt, meta))
    recurrent = gguf_recurrent(meta, trunk)
    return trunk.spec("qwen3_5_moe", [LayerSpec(gdn if r else attention, moe) for r in recurrent])


FAMILY = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    gguf_names=("qwen35moe",),
    hf=Dialect(_hf_spec, partial(hf_sources, naming={**HF, **HF_GDN, **HF_CENTERED}), hf_experts),
    gguf=Dialect(
        _gguf_spec,
        partial(gguf_sources, naming={**GGUF, "ffn_norm": "post_attention_norm.weight"}),
        gguf_experts,
    ),
)
