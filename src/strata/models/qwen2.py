"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases on query, key and value.

Sources: transformers ``models/qwen2``; llama.cpp architecture ``qwen2``.
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
from strata.models.family_parts import gguf_rotary_dims, gqa
from strata.models.names import GGUF, HF
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.spec import DenseFfnSpec, LayerSpec, ModelSpec
from strata.models.tables import gguf_sources, hf_sources, no_experts


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("use_sliding_window", False)
    mixer = replace(gqa(trunk, hf_rotary(config, trunk.head_dim, Defaults())), bias=True)
    layer = LayerSpec(mixer, DenseFfnSpec(config.size("intermediate_size")))
    return trunk.spec("qwen2", [layer] * trunk.n_layers)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk))
    mixer = replace(gqa(trunk, rotary), bias=True)
    layer = LayerSpec(mixer, DenseFfnSpec(meta.size("feed_forward_length")))
    return trunk.spec("qwen2", [layer] * trunk.n_layers)


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    gguf_names=("qwen2",),
    hf=Dialect(_hf_spec, partial(hf_sources, naming=HF), no_experts),
    gguf=Dialect(_gguf_spec, partial(gguf_sources, naming=GGUF), no_experts),
)
