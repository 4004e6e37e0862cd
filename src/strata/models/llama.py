"""Llama, dense: grouped-query attention and a gated feed-forward.

The GGUF converter permutes query and key rows, so a GGUF rotates neighbouring dims ("pairs") where
HF rotates halves; a scaling of the frequencies (Llama 3.1) is stored there as one factor per pair
in rope_freqs.weight. Sources: transformers ``models/llama``; llama.cpp architecture ``llama``.
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
from strata.models.family_parts import gguf_qkv_bias, gguf_rotary_dims, gqa
from strata.models.names import GGUF, HF
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.sources import Sources
from strata.models.spec import DenseFfnSpec, LayerSpec, ModelSpec
from strata.models.tables import gguf_sources, hf_sources, no_experts

_FACTORS = "rope_freqs.weight"


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("mlp_bias", False)
    config.require("pretraining_tp", 1)
    bias = config.flag("attention_bias", False)
    rotary = hf_rotary(config, trunk.head_dim, Defaults())
    mixer = replace(gqa(trunk, rotary), bias=bias, o_bias=bias)
    layer = LayerSpec(mixer, DenseFfnSpec(config.size("intermediate_size")))
    return trunk.spec("llama", [layer] * trunk.n_layers)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    meta.require("expert_count", 0)
    factors = ckpt.float32(_FACTORS).tolist() if _FACTORS in ckpt.tensors else None
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk), "pairs", factors=factors)
    mixer = replace(
        gqa(trunk, rotary),
        bias=gguf_qkv_bias(ckpt),
        o_bias="blk.0.attn_output.bias" in ckpt.tensors,
    )
    layer = LayerSpec(mixer, DenseFfnSpec(meta.size("feed_forward_length")))
    return trunk.spec("llama", [layer] * trunk.n_layers)


def _gguf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    read = {_FACTORS: "rotary frequencies"} if _FACTORS in ckpt.tensors else {}
    return replace(gguf_sources(ckpt, spec, GGUF), read=read)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    gguf_names=("llama",),
    hf=Dialect(_hf_spec, partial(hf_sources, naming=HF), no_experts),
    gguf=Dialect(_gguf_spec, _gguf_sources, no_experts),
)
