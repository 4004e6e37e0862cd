"""Qwen3-MoE: grouped-query attention with query and key norms, routed experts, no shared expert.

Sources: transformers ``models/qwen3_moe``; llama.cpp architecture ``qwen3moe``.
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
    gguf_rotary_dims,
    gguf_softmax_moe,
    gqa,
    hf_softmax_moe,
    hf_sparse_layers,
)
from strata.models.names import GGUF, HF
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.spec import DenseFfnSpec, LayerSpec, ModelSpec
from strata.models.tables import gguf_experts, gguf_sources, hf_experts, hf_sources


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("attention_bias", False)
    config.require("use_sliding_window", False)
    mixer = replace(gqa(trunk, hf_rotary(config, trunk.head_dim, Defaults())), qk_norm=True)
    moe = hf_softmax_moe(config, normalize=False)
    layers = [
        LayerSpec(mixer, moe if sparse else DenseFfnSpec(config.size("intermediate_size")))
        for sparse in hf_sparse_layers(config, trunk)
    ]
    return trunk.spec("qwen3_moe", layers)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk))
    layer = LayerSpec(replace(gqa(trunk, rotary), qk_norm=True), gguf_softmax_moe(meta, True))
    return trunk.spec("qwen3_moe", [layer] * trunk.n_layers)


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    gguf_names=("qwen3moe",),
    hf=Dialect(_hf_spec, partial(hf_sources, naming=HF), hf_experts),
    gguf=Dialect(_gguf_spec, partial(gguf_sources, naming=GGUF), gguf_experts),
)
