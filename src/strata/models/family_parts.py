"""Settings that several families state in the same words, as pieces of a ModelSpec.

Knows no names of tensors.
"""

from __future__ import annotations

from typing import Literal

from strata.formats.checkpoint import Checkpoint
from strata.models.config import Config
from strata.models.family import Trunk
from strata.models.spec import (
    AttentionSpec,
    DenseFfnSpec,
    GdnSpec,
    LayerSpec,
    MixerSpec,
    MoeSpec,
    RotarySpec,
)


def gqa(trunk: Trunk, rotary: RotarySpec) -> AttentionSpec:
    """Plain grouped-query attention over the whole context; families ``replace`` what they add."""
    return AttentionSpec(
        n_heads=trunk.n_heads,
        n_kv_heads=trunk.n_kv_heads,
        head_dim=trunk.head_dim,
        rotary=rotary,
        scale=trunk.head_dim**-0.5,
    )


def gguf_qkv_bias(ckpt: Checkpoint) -> bool:
    """Whether query, key and value have biases, which a GGUF only shows by having the tensors."""
    return any(f"blk.0.attn_{name}.bias" in ckpt.tensors for name in ("q", "qkv"))


def gguf_shared_width(ckpt: Checkpoint, meta: Config) -> int:
    """Width of the shared expert: the key, or the tensor's rows in files without it."""
    tensor = ckpt.tensors.get("blk.0.ffn_gate_shexp.weight")
    rows = tensor.n_rows if tensor is not None else None
    return meta.size("expert_shared_feed_forward_length", default=rows)


def gguf_rotary_dims(meta: Config, trunk: Trunk) -> int:
    """Rotated dims of a head. Keys and values of different widths are refused."""
    meta.require("attention.value_length", trunk.head_dim)
    return meta.size("rope.dimension_count", default=trunk.head_dim, most=trunk.head_dim)


def hf_sparse_layers(config: Config, trunk: Trunk) -> list[bool]:
    """Which layers have routed experts, by mlp_only_layers and decoder_sparse_step."""
    dense = config.whole_numbers("mlp_only_layers") or ()
    step = config.size("decoder_sparse_step", default=1)
    return [i not in dense and (i + 1) % step == 0 for i in range(trunk.n_layers)]


def hf_softmax_moe(config: Config, normalize: bool, shared_width: int = 0) -> MoeSpec:
    """Qwen's router: softmax over all experts.

    normalize: where the config is silent about norm_topk_prob.
    """
    return MoeSpec(
        n_experts=config.size("num_experts", "num_local_experts"),
        n_active=config.size("num_experts_per_tok"),
        width=config.size("moe_intermediate_size"),
        scoring="softmax",
        normalize=config.flag("norm_topk_prob", normalize),
        shared_width=shared_width,
        shared_gate=shared_width > 0,
    )


def gguf_softmax_moe(meta: Config, normalize: bool, shared_width: int = 0) -> MoeSpec:
    """The same from a GGUF, whose architecture implies whether weights are renormalised."""
    meta.require("expert_weights_scale", 0.0, 1.0)
    return MoeSpec(
        n_experts=meta.size("expert_count"),
        n_active=meta.size("expert_used_count"),
        width=meta.size("expert_feed_forward_length"),
        scoring="softmax",
        normalize=normalize,
        shared_width=shared_width,
        shared_gate=shared_width > 0,
    )


SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func in GGUF files."""


def hf_sigmoid_moe(config: Config) -> MoeSpec:
    """Router of DeepSeek-V3 and GLM-4.5: sigmoid, a correction for the choice, groups, a scale."""
    width = config.size("moe_intermediate_size")
    return MoeSpec(
        n_experts=config.size("n_routed_experts", "num_local_experts"),
        n_active=config.size("num_experts_per_tok"),
        width=width,
        scoring="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", default=1.0),
        correction=True,
        n_groups=config.size("n_group", default=1),
        groups_kept=config.size("topk_group", default=1),
        shared_width=width * config.count("n_shared_experts", default=0),
    )


def gguf_sigmoid_moe(meta: Config) -> MoeSpec:
    """The same from a GGUF."""
    width = meta.size("expert_feed_forward_length")
    n_groups = max(1, meta.count("expert_group_count", default=1))
    return MoeSpec(
        n_experts=meta.size("expert_count"),
        n_active=meta.size("expert_used_count"),
        width=width,
        scoring="sigmoid",
        normalize=meta.flag("expert_weights_norm", False),
        scale=meta.number("expert_weights_scale", default=1.0) or 1.0,
        correction=True,
        n_groups=n_groups,
        groups_kept=max(1, meta.count("expert_group_used_count", default=1)) if n_groups > 1 else 1,
        shared_width=width * meta.count("expert_shared_count", default=0),
    )


def leading_dense(
    trunk: Trunk, mixer: MixerSpec, moe: MoeSpec, n_dense: int, dense_width: int
) -> list[LayerSpec]:
    """The same mixer everywhere; the first n_dense layers have a dense feed-forward."""
    dense = DenseFfnSpec(dense_width)
    return [LayerSpec(mixer, dense if i < n_dense else moe) for i in range(trunk.n_layers)]


def hf_gdn(config: Config, output_gate: Literal["silu", "sigmoid"]) -> GdnSpec:
    """Gated DeltaNet of a config.json; value heads lie grouped by key head."""
    return GdnSpec(
        n_k_heads=config.size("linear_num_key_heads"),
        n_v_heads=config.size("linear_num_value_heads"),
        k_dim=config.size("linear_key_head_dim"),
        v_dim=config.size("linear_value_head_dim"),
        conv_taps=config.size("linear_conv_kernel_dim"),
        head_order="grouped",
        output_gate=output_gate,
    )


def gguf_gdn(
    meta: Config,
    head_order: Literal["grouped", "interleaved"],
    output_gate: Literal["silu", "sigmoid"],
) -> GdnSpec:
    """Gated DeltaNet of a GGUF, where it wears the names of a state-space model."""
    n_v_heads, inner = meta.size("ssm.time_step_rank"), meta.size("ssm.inner_size")
    return GdnSpec(
        n_k_heads=meta.size("ssm.group_count"),
        n_v_heads=n_v_heads,
        k_dim=meta.size("ssm.state_size"),
        v_dim=max(1, inner // n_v_heads),
        conv_taps=meta.size("ssm.conv_kernel"),
        head_order=head_order,
        output_gate=output_gate,
    )


def hf_recurrent(config: Config, trunk: Trunk, attention: tuple[str, ...]) -> list[bool]:
    """Which layers are linear attention; ``attention``: names of the other kind in layer_types."""
    kinds = config.per_layer("layer_types", trunk.n_layers)
    if kinds is None:
        interval = config.size("full_attention_interval", default=4)
        return [(i + 1) % interval != 0 for i in range(trunk.n_layers)]
    known = ("linear_attention", *attention)
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise config.unsupported("layer_types", unknown[0], " or ".join(repr(k) for k in known))
    return [kind == "linear_attention" for kind in kinds]


def gguf_recurrent(meta: Config, trunk: Trunk) -> list[bool]:
    """The same from a GGUF."""
    flags = meta.per_layer("attention.recurrent_layers", trunk.n_layers)
    if flags is None:
        interval = meta.size("full_attention_interval", default=4)
        return [(i + 1) % interval != 0 for i in range(trunk.n_layers)]
    return [bool(flag) for flag in flags]
