"""gpt-oss: sliding and full attention by turns with sinks, YaRN, clamped swiglu, biases.

YaRN's ramp is not rounded to whole dims (truncate false). A GGUF does not record that, so it is
assumed here. Sources: transformers ``models/gpt_oss``; llama.cpp architecture ``gpt-oss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from strata.formats.checkpoint import Checkpoint
from strata.models.config import Config
from strata.models.expert_layouts import ExpertLayout, GptOssFloat, GptOssMxfp4
from strata.models.expert_source import ExpertSource
from strata.models.family import (
    Dialect,
    Family,
    Trunk,
    gguf_config,
    gguf_trunk,
    hf_config,
    hf_trunk,
)
from strata.models.family_parts import gguf_rotary_dims, gqa
from strata.models.names import GGUF, HF, Naming
from strata.models.rope_config import Defaults, gguf_rotary, hf_rotary
from strata.models.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, RotarySpec
from strata.models.tables import (
    expert_sizes,
    experts_from,
    gguf_experts,
    gguf_sources,
    hf_sources,
)

_HF_NAMES: Naming = {
    **HF,
    "moe.router": "mlp.router.weight",
    "moe.router_bias": "mlp.router.bias",
}
_KINDS = ("sliding_attention", "full_attention")


def _attention(trunk: Trunk, rotary: RotarySpec, bias: bool) -> AttentionSpec:
    return replace(gqa(trunk, rotary), bias=bias, o_bias=bias, sinks=True)


def _layers(
    attention: AttentionSpec, moe: MoeSpec, window_tokens: int, sliding: Sequence[bool]
) -> list[LayerSpec]:
    local = replace(attention, window_tokens=window_tokens)
    return [LayerSpec(local if slides else attention, moe) for slides in sliding]


def _moe(n_experts: int, n_active: int, width: int, limit: float) -> MoeSpec:
    return MoeSpec(
        n_experts=n_experts,
        n_active=n_active,
        width=width,
        scoring="softmax_topk",
        normalize=False,
        router_bias=True,
        activation="swiglu_oai",
        swiglu_limit=limit,
        expert_bias=True,
    )


def _hf_spec(ckpt: Checkpoint) -> ModelSpec:
    config = hf_config(ckpt)
    trunk = hf_trunk(ckpt, config)
    config.require("swiglu_alpha", 1.702)
    rotary = hf_rotary(config, trunk.head_dim, Defaults(theta=150000.0))
    attention = _attention(trunk, rotary, config.flag("attention_bias", True))
    moe = _moe(
        config.size("num_local_experts", "num_experts"),
        config.size("num_experts_per_tok", "experts_per_token"),
        config.size("intermediate_size"),
        config.number("swiglu_limit", default=7.0),
    )
    kinds = config.per_layer("layer_types", trunk.n_layers)
    if kinds is None:
        kinds = [_KINDS[i % 2] for i in range(trunk.n_layers)]
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise config.unsupported("layer_types", unknown[0], " or ".join(map(repr, _KINDS)))
    sliding = [kind == _KINDS[0] for kind in kinds]
    return trunk.spec("gpt_oss", _layers(attention, moe, config.size("sliding_window"), sliding))


def _gguf_spec(ckpt: Checkpoint) -> ModelSpec:
    meta = gguf_config(ckpt)
    trunk = gguf_trunk(ckpt, meta)
    meta.require("rope.freq_base_swa", meta.get("rope.freq_base"))
    rotary = gguf_rotary(meta, gguf_rotary_dims(meta, trunk), truncate=False)
    attention = _attention(trunk, rotary, bias=True)
    moe = _moe(
        meta.size("expert_count"),
        meta.size("expert_used_count"),
        meta.size("expert_feed_forward_length"),
        limit=7.0,
    )
    window = meta.size("attention.sliding_window")
    return trunk.spec("gpt_oss", _layers(attention, moe, window, _gguf_sliding(meta, trunk)))


def _gguf_sliding(meta: Config, trunk: Trunk) -> list[bool]:
    """Sliding and full by turns unless the file has flags, or a period whose last is full."""
    pattern = meta.get("attention.sliding_window_pattern")
    if pattern is None or isinstance(pattern, int):
        period = 2 if pattern is None else meta.size("attention.sliding_window_pattern")
        return [i % period < period - 1 for i in range(trunk.n_layers)]
    flags = meta.per_layer("attention.sliding_window_pattern", trunk.n_layers) or []
    return [bool(flag) for flag in flags]


def _hf_experts(ckpt: Checkpoint, spec: ModelSpec) -> ExpertSource:
    layouts: dict[int, ExpertLayout] = {}
    for index, sizes in expert_sizes(spec).items():
        prefix = f"model.layers.{index}.mlp.experts."
        packed = prefix + "gate_up_proj_blocks" in ckpt.tensors
        layouts[index] = (GptOssMxfp4 if packed else GptOssFloat)(ckpt, sizes, prefix)
    return experts_from(layouts, spec)


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    gguf_names=("gpt-oss",),
    hf=Dialect(_hf_spec, partial(hf_sources, naming=_HF_NAMES), _hf_experts),
    gguf=Dialect(
        _gguf_spec,
        partial(gguf_sources, naming={**GGUF, "ffn_norm": "post_attention_norm.weight"}),
        gguf_experts,
    ),
)
