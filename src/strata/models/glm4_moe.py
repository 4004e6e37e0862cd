"""GLM-4.5-MoE: partial rotary, leading dense layers, sigmoid router, ungated shared expert.

Sources: transformers ``models/glm4_moe``; llama.cpp architecture ``glm4moe``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from strata.formats.checkpoint import Checkpoint
from strata.models.config import Config
from strata.models.family import (
    Dialect,
    Family,
    Trunk,
    gguf_config,
    gguf_trunk,
    hf_config,
    hf_trunk,
)
from strata.models.family_parts import (
    SIGMOID,
    gguf_qkv_bias,
    gguf_rotary_dims,
    gguf_sigmoid_moe,
    gqa,
    hf_sigmoid_moe,
    leading_dense,
)
from strata.models.names import GGUF, HF, HF_SHARED_EXPERTS
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.sources import Sources
from strata.models.spec import ModelSpec
from strata.models.tables import (
    gguf_experts,
    gguf_sources,
    hf_draft_layers,
    hf_experts,
    hf_sources,
)


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    mixer = replace(
        gqa(trunk, hf_rotary(config, trunk.head_dim, Defaults(partial=0.5))),
        bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    moe = hf_sigmoid_moe(config)
    n_dense = config.count("first_k_dense_replace", default=1)
    width = config.size("intermediate_size")
    return trunk.spec("glm4_moe", leading_dense(trunk, mixer, moe, n_dense, width))


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    meta.require("expert_gating_func", SIGMOID)
    mixer = replace(
        gqa(trunk, gguf_rotary(meta, _rotary_dims(meta, trunk))),
        bias=gguf_qkv_bias(ckpt),
        qk_norm="blk.0.attn_q_norm.weight" in ckpt.tensors,
    )
    n_dense = meta.count("leading_dense_block_count", default=0)
    moe = gguf_sigmoid_moe(meta)
    width = meta.size("feed_forward_length")
    return trunk.spec("glm4_moe", leading_dense(trunk, mixer, moe, n_dense, width))


def _rotary_dims(meta: Config, trunk: Trunk) -> int:
    meta.require("rope.dimension_sections")
    return gguf_rotary_dims(meta, trunk)


def _hf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    return hf_sources(ckpt, spec, {**HF, **HF_SHARED_EXPERTS}, hf_draft_layers(ckpt, spec))


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    gguf_names=("glm4moe",),
    hf=Dialect(_hf_spec, _hf_sources, hf_experts),
    gguf=Dialect(
        _gguf_spec,
        partial(gguf_sources, naming={**GGUF, "ffn_norm": "post_attention_norm.weight"}),
        gguf_experts,
    ),
)
