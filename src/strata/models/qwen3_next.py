"""Qwen3-Next: Gated DeltaNet, a gated full-attention layer every fourth, shared expert.

HF fuses the projections by key head: [q | k | v | z] and [b | a] of head 0, then of head 1, and so
on. llama.cpp's converter untangles the first and keeps the second; older conversions keep both.
Sources: transformers ``models/qwen3_next``; llama.cpp architecture ``qwen3next``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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
    hf_sparse_layers,
)
from strata.models.names import GGUF, HF, HF_CENTERED, HF_GDN, Naming
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.sources import Rows, Source, Sources, Take
from strata.models.spec import DenseFfnSpec, GdnSpec, LayerSpec, ModelSpec
from strata.models.tables import gguf_experts, gguf_sources, hf_experts, hf_sources

_GGUF_NAMES: Naming = {**GGUF, "ffn_norm": "post_attention_norm.weight"}


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("attention_bias", False)
    rotary = hf_rotary(config, trunk.head_dim, Defaults(partial=0.25))
    attention = replace(gqa(trunk, rotary), qk_norm=True, gate=True)
    gdn = hf_gdn(config, "silu")
    moe = hf_softmax_moe(config, True, config.size("shared_expert_intermediate_size"))
    layers = [
        LayerSpec(
            gdn if recurrent else attention,
            moe if sparse else DenseFfnSpec(config.size("intermediate_size")),
        )
        for recurrent, sparse in zip(
            hf_recurrent(config, trunk, ("full_attention",)),
            hf_sparse_layers(config, trunk),
            strict=True,
        )
    ]
    return trunk.spec("qwen3_next", layers)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk))
    attention = replace(gqa(trunk, rotary), qk_norm=True, gate=True)
    gdn = gguf_gdn(meta, "grouped", "silu")
    moe = gguf_softmax_moe(meta, True, gguf_shared_width(ckpt, meta))
    layers = [LayerSpec(gdn if r else attention, moe) for r in gguf_recurrent(meta, trunk)]
    return trunk.spec("qwen3_next", layers)


def _by_key_head(n_heads: int, sizes: tuple[int, ...]) -> list[Take]:
    """Rows of each piece over all heads, where every key head holds the pieces in order."""
    per_head = sum(sizes)
    rows = np.arange(n_heads * per_head).reshape(n_heads, per_head)
    ends = np.cumsum(sizes)
    return [
        Take(rows[:, end - size : end].reshape(-1), rows.size)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _fused_qkvz(gdn: GdnSpec) -> tuple[Take, Take]:
    """(qkv, z) rows of in_proj_qkvz."""
    n_value = gdn.n_v_heads // gdn.n_k_heads * gdn.v_dim
    q, k, v, z = _by_key_head(gdn.n_k_heads, (gdn.k_dim, gdn.k_dim, n_value, n_value))
    return Take(np.concatenate([q.rows, k.rows, v.rows]), q.of), z


def _fused_ba(gdn: GdnSpec) -> tuple[Take, Take]:
    """(b, a) rows of in_proj_ba."""
    per_head = gdn.n_v_heads // gdn.n_k_heads
    b, a = _by_key_head(gdn.n_k_heads, (per_head, per_head))
    return b, a


def _fused(spec: ModelSpec, layer: str, qkvz: str | None, ba: str) -> dict[str, Source]:
    """Sources of the fused projections of every DeltaNet layer; layer: name prefix with {}."""
    found: dict[str, Source] = {}
    for index, each in enumerate(spec.layers):
        if not isinstance(each.mixer, GdnSpec):
            continue
        role, prefix = f"layers.{index}.gdn.", layer.format(index)
        b, a = _fused_ba(each.mixer)
        found[role + "b"], found[role + "a"] = Rows((prefix + ba,), b), Rows((prefix + ba,), a)
        if qkvz is not None:
            qkv, z = _fused_qkvz(each.mixer)
            found[role + "qkv"] = Rows((prefix + qkvz,), qkv)
            found[role + "z"] = Rows((prefix + qkvz,), z)
    return found


def _hf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    table = hf_sources(ckpt, spec, {**HF, **HF_GDN, **HF_CENTERED})
    names = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
    return replace(table, roles={**table.roles, **_fused(spec, "model.layers.{}.", *names)})


def _gguf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    table = gguf_sources(ckpt, spec, _GGUF_NAMES)
    older = any(name.endswith(".ssm_in.weight") for name in ckpt.tensors)
    fused = _fused(spec, "blk.{}.", "ssm_in.weight" if older else None, "ssm_ba.weight")
    return replace(table, roles={**table.roles, **fused})


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    gguf_names=("qwen3next",),
    hf=Dialect(_hf_spec, _hf_sources, hf_experts),
    gguf=Dialect(_gguf_spec, _gguf_sources, gguf_experts),
)
