"""Qwen2-MoE: biases on query, key and value, routed experts, and a shared expert behind a gate.

Sources: transformers ``models/qwen2_moe``; llama.cpp architecture ``qwen2moe``.
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
    gguf_qkv_bias,
    gguf_rotary_dims,
    gguf_shared_width,
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
    config.require("use_sliding_window", False)
    bias = config.flag("qkv_bias", True)
    mixer = replace(gqa(trunk, hf_rotary(config, trunk.head_dim, Defaults())), bias=bias)
    moe = hf_softmax_moe(config, False, config.size("shared_expert_intermediate_size"))
    layers = [
        LayerSpec(mixer, moe if sparse else DenseFfnSpec(config.size("intermediate_size")))
        for sparse in hf_sparse_layers(config, trunk)
    ]
    return trunk.spec("qwen2_moe", layers)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk))
    mixer = replace(gqa(trunk, rotary), bias=gguf_qkv_bias(ckpt))
    moe = gguf_softmax_moe(meta, False, gguf_shared_width(ckpt, meta))
    return trunk.spec("qwen2_moe", [LayerSpec(mixer, moe)] * trunk.n_layers)


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    gguf_names=("qwen2moe",),
    hf=Dialect(_hf_spec, partial(hf_sources, naming=HF), hf_experts),
    gguf=Dialect(_gguf_spec, partial(gguf_sources, naming=GGUF), gguf_experts),
)
