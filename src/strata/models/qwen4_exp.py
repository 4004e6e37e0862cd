"""Qwen4-Exp (Qwen3.8-Flash-Next): DeltaNet and block-selecting attention, hyper-connections.

Reads of the residual streams take the place of norms; every layer has routed and shared experts,
and an n-gram block stands in front of one.

GGUF files lay the value heads out so that value head i uses key head i mod n, store norms as 1 + w
and the decay as -exp(A_log), and split the indexer's projection. The n-gram table, larger than
everything else, stays on disk. Sources: transformers ``models/qwen4_exp``; llama.cpp
``conversion/qwen4exp.py`` and ``src/models/qwen4exp.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import Checkpoint
from strata.models.config import MOST_TOKENS, Config
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
from strata.models.names import GGUF, HF, HF_CENTERED, HF_GDN, Naming, plus_one
from strata.models.ngram import NgramConstants, ngram_constants
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.sources import Rows, Source, Sources, Take
from strata.models.spec import (
    AttentionSpec,
    GdnSpec,
    IndexerSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NgramSpec,
    RotarySpec,
)
from strata.models.tables import (
    gguf_experts,
    gguf_sources,
    hf_experts,
    hf_sources,
    hf_top,
)

_MOST_NGRAM = 256
"""Longest n-gram, and most heads each; the settings make a table for every head."""


def _hf_read(role: str, module: str) -> Naming:
    return {
        f"{role}.norm": plus_one(f"{module}.hc_norm.weight"),
        f"{role}.down": f"{module}.input_mix_weight_down.weight",
        f"{role}.up": f"{module}.input_mix_weight_up.weight",
        f"{role}.inject": f"{module}.block_inject_weight.weight",
    }


def _gguf_read(role: str, stem: str) -> Naming:
    return {f"{role}.{part}": f"{stem}_{part}.weight" for part in ("norm", "down", "up", "inject")}


_HF_NAMES: Naming = {
    **HF,
    **HF_GDN,
    **HF_CENTERED,
    **_hf_read("attn_read", "attn_hyper_connection"),
    **_hf_read("ffn_read", "mlp_hyper_connection"),
    **_hf_read("head_read", "hyper_connection_mixer"),
    "index.q_norm": plus_one("self_attn.indexer.q_layernorm.weight"),
    "index.k_norm": plus_one("self_attn.indexer.k_layernorm.weight"),
    "ngram.key": "ple.key_proj.weight",
    "ngram.value": "ple.value_proj.weight",
    "ngram.norm_key": plus_one("ple.norm_key.weight"),
    "ngram.norm_query": plus_one("ple.norm_query.weight"),
    "ngram.norm_conv": plus_one("ple.norm_conv.weight"),
    "ngram.conv": "ple.conv1d.weight",
}
_GGUF_NAMES: Naming = {
    **GGUF,
    **_gguf_read("attn_read", "hc_attn"),
    **_gguf_read("ffn_read", "hc_ffn"),
    **_gguf_read("head_read", "/output_hc"),
    "index.q": "indexer.q_proj.weight",
    "index.k": "indexer.k_proj.weight",
    "index.q_norm": "indexer.q_norm.weight",
    "index.k_norm": "indexer.k_norm.weight",
    "ngram.key": "ple_key.weight",
    "ngram.value": "ple_value.weight",
    "ngram.norm_key": "ple_norm_key.weight",
    "ngram.norm_query": "ple_norm_query.weight",
    "ngram.norm_conv": "ple_norm_conv.weight",
    "ngram.conv": "ple_conv1d.weight",
    "ngram.table": lambda prefix: Rows(("per_layer_token_embd.weight",), on_disk=True),
}


def _attention(trunk: Trunk, rotary: RotarySpec, indexer: IndexerSpec | None) -> AttentionSpec:
    return replace(gqa(trunk, rotary), qk_norm=True, gate=True, indexer=indexer)


def _layers(
    recurrent: Sequence[bool],
    gdn: GdnSpec,
    attention: AttentionSpec,
    moe: MoeSpec,
    ngrams: dict[int, NgramSpec],
) -> list[LayerSpec]:
    return [
        LayerSpec(gdn if r else attention, moe, ngrams.get(index))
        for index, r in enumerate(recurrent)
    ]


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("attention_bias", False)
    config.require("indexer_kv_heads", 1)
    gate: Literal["silu", "sigmoid"] = "silu"
    config.require("output_gate_type", "silu", "sigmoid")
    if config.get("output_gate_type") == "sigmoid":
        gate = "sigmoid"
    rotary = hf_rotary(config, trunk.head_dim, Defaults())
    recurrent = hf_recurrent(config, trunk, ("full_attention", "indexed_attention"))
    indexer = None if all(recurrent) else _hf_indexer(config)
    attention = _attention(trunk, rotary, indexer)
    moe = hf_softmax_moe(config, True, config.size("shared_expert_intermediate_size"))
    layers = _layers(recurrent, hf_gdn(config, gate), attention, moe, _hf_ngrams(ckpt, config))
    return trunk.spec(
        "qwen4_exp",
        layers,
        streams=config.size("hc_count", default=4),
        hc_rank=config.size("hc_lowrank", default=320),
    )


def _hf_indexer(config: Config) -> IndexerSpec:
    return IndexerSpec(
        n_heads=config.size("indexer_n_heads"),
        head_dim=config.size("indexer_head_dim"),
        budget_tokens=config.size("indexer_budget", most=MOST_TOKENS),
        block_tokens=config.size("indexer_compress_ratio"),
    )


def _hf_ngrams(ckpt: Checkpoint, config: Config) -> dict[int, NgramSpec]:
    """By layer; ple_layer_ids count from 1. At most one block is supported."""
    ids = sorted(set(config.whole_numbers("ple_layer_ids") or ()))
    if len(ids) > 1:
        raise config.unsupported("ple_layer_ids", ids, "one n-gram layer")
    if not ids:
        return {}
    layer, eos = ids[0] - 1, config.whole_numbers("eos_token_id")
    if not eos:
        raise config.wrong("eos_token_id", None, "the token that ends an n-gram")
    constants = _hf_constants(ckpt, config, layer)
    width = config.size("ple_embed_dim", default=config.size("hidden_size"))
    ngram_size = config.size("ngram_size", default=3)
    ngram = NgramSpec(
        ngram_size=ngram_size,
        heads_per_ngram=config.size("heads_per_ngram", default=8),
        head_dim=width // len(constants.head_vocab),
        conv_taps=config.size("ple_conv_kernel_size", default=4),
        dilation=ngram_size,
        multipliers=constants.multipliers,
        head_vocab=constants.head_vocab,
        head_offset=constants.head_offset,
        eos_token=eos[0],
    )
    return {layer: ngram}


def _hf_constant_names(ckpt: Checkpoint, layer: int) -> tuple[str, str, str]:
    prefix = f"{hf_top(ckpt)}layers.{layer}.ple.ple_embedding."
    return (
        prefix + "layer_multipliers",
        prefix + "ngram_heads_vocab_sizes",
        prefix + "ngram_heads_offsets",
    )


def _hf_constants(ckpt: Checkpoint, config: Config, layer: int) -> NgramConstants:
    """The checkpoint's own hash constants where it has them, else those its settings imply."""
    implied = ngram_constants(
        n_vocab=config.size("vocab_size", most=MOST_TOKENS),
        ngram_size=config.size("ngram_size", default=3, most=_MOST_NGRAM),
        heads_per_ngram=config.size("heads_per_ngram", default=8, most=_MOST_NGRAM),
        vocab_base=config.size("ngram_vocab_size_base", default=20_000_000, most=MOST_TOKENS),
        divisible_by=config.size("make_ngram_vocab_size_divisible_by", default=128),
        seed=config.count("seed", default=1234, most=1 << 63),
    )
    names = _hf_constant_names(ckpt, layer)
    if any(name not in ckpt.tensors for name in names):
        return implied
    multipliers, vocab, offsets = (tuple(ckpt.array(n).reshape(-1).tolist()) for n in names)
    return replace(implied, multipliers=multipliers, head_vocab=vocab, head_offset=offsets)


def _hf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    table = hf_sources(ckpt, spec, _HF_NAMES)
    roles: dict[str, Source] = dict(table.roles)
    read: dict[str, str] = {}
    for index, layer in enumerate(spec.layers):
        prefix, role = f"{hf_top(ckpt)}layers.{index}.", f"layers.{index}."
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.indexer is not None:
            fused = (prefix + "self_attn.indexer.index_qk_proj.weight",)
            n_q = layer.mixer.indexer.n_heads * layer.mixer.indexer.head_dim
            n = n_q + layer.mixer.indexer.head_dim
            roles[role + "index.q"] = Rows(fused, Take(np.arange(n_q), n))
            roles[role + "index.k"] = Rows(fused, Take(np.arange(n_q, n), n))
        if layer.ngram is not None:
            roles[role + "ngram.table"] = _hf_table(ckpt, prefix)
            names = _hf_constant_names(ckpt, index)
            read |= {name: "n-gram hash constants" for name in names if name in ckpt.tensors}
    return replace(table, roles=roles, read=read)


def _hf_table(ckpt: Checkpoint, prefix: str) -> Rows:
    """The n-gram table: one tensor, or shards whose order is their number."""
    stem = prefix + "ple.ple_embedding.ngram_embedding."
    shard = re.compile(re.escape(stem) + r"shard_(\d+)\.weight")
    numbered = [(int(m[1]), name) for name in ckpt.tensors if (m := shard.fullmatch(name))]
    if not numbered:
        return Rows((stem + "weight",), on_disk=True)
    # a gap in the numbers would shift every row behind it, so missing shards are named too
    count = 1 + max(number for number, _ in numbered)
    if count > len(ckpt.tensors):
        raise FormatError(
            f"{ckpt.path} has {len(numbered)} shards of the n-gram table but their numbers go up "
            f"to {count - 1}; shards are missing or the names are damaged"
        )
    return Rows(tuple(f"{stem}shard_{i}.weight" for i in range(count)), on_disk=True)


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    recurrent = gguf_recurrent(meta, trunk)
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk))
    attention = _attention(trunk, rotary, _gguf_indexer(meta, trunk, recurrent))
    gdn = gguf_gdn(meta, "interleaved", "sigmoid")
    moe = gguf_softmax_moe(meta, True, gguf_shared_width(ckpt, meta))
    return trunk.spec(
        "qwen4_exp",
        _layers(recurrent, gdn, attention, moe, _gguf_ngrams(meta)),
        streams=meta.size("hyper_connection.count"),
        hc_rank=meta.size("hyper_connection.low_rank"),
    )


def _gguf_indexer(meta: Config, trunk: Trunk, recurrent: Sequence[bool]) -> IndexerSpec | None:
    """Block selection, the same on every attention layer; refused where the file has lost it."""
    qsa = [index for index, r in enumerate(recurrent) if not r]
    if not qsa:
        return None
    key = "attention.compress_ratios"
    ratios = meta.per_layer(key, trunk.n_layers)
    chosen = {0} if ratios is None else {int(ratios[index]) for index in qsa}
    if chosen == {0}:
        raise UnsupportedError(
            f"{meta.where}: {meta.prefix}{key} is {'missing' if ratios is None else 'all 0'}, "
            f"although layers {qsa} choose the blocks they attend to; dense attention would be "
            f"another model. A converter that misses the layer type 'indexed_attention' does this: "
            f"convert again with 'full_attention' in layer_types, or use another file"
        )
    if len(chosen) > 1:
        raise meta.unsupported(key, ratios, "one ratio for all attention layers")
    return IndexerSpec(
        n_heads=meta.size("attention.indexer.head_count"),
        head_dim=meta.size("attention.indexer.key_length"),
        budget_tokens=meta.size("attention.indexer.top_k", most=MOST_TOKENS),
        block_tokens=chosen.pop(),
    )


def _gguf_ngrams(meta: Config) -> dict[int, NgramSpec]:
    """By layer; ple.layers count from 0.

    All tables would lie in one tensor, so only one block is supported.
    """
    layers = meta.whole_numbers("ple.layers") or ()
    if len(layers) > 1:
        raise meta.unsupported("ple.layers", list(layers), "one n-gram layer")
    if not layers:
        return {}
    lists = {}
    for key in ("layer_multipliers", "head_vocab_sizes", "head_offsets"):
        lists[key] = meta.whole_numbers(f"ple.{key}")
        if not lists[key]:
            raise meta.wrong(f"ple.{key}", None, "a list of whole numbers")
    ngram_size = meta.size("ple.ngram_size")
    return {
        layers[0]: NgramSpec(
            ngram_size=ngram_size,
            heads_per_ngram=meta.size("ple.heads_per_ngram"),
            head_dim=meta.size("embedding_length_per_layer_input"),
            conv_taps=meta.size("ple.conv_kernel"),
            dilation=ngram_size,
            multipliers=lists["layer_multipliers"] or (),
            head_vocab=lists["head_vocab_sizes"] or (),
            head_offset=lists["head_offsets"] or (),
            eos_token=meta.count("ple.eos_token_id"),
        )
    }


def _gguf_sources(ckpt: Checkpoint, spec: ModelSpec) -> Sources:
    return gguf_sources(ckpt, spec, _GGUF_NAMES)


FAMILY = Family(
    name="qwen4_exp",
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    model_types=("qwen4_exp", "qwen4_exp_text"),
    gguf_names=("qwen4exp",),
    hf=Dialect(_hf_spec, _hf_sources, hf_experts),
    gguf=Dialect(_gguf_spec, _gguf_sources, gguf_experts),
)
