"""Configurations of tiny models, one function per family: sizes -> (class, config, traits)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """h hidden, hd head dim, inter expert width, e experts, k of them per token.

    budget, ratio, index_heads: block selection of qwen4_exp.
    """

    h: int
    heads: int
    kv: int
    hd: int
    inter: int
    e: int
    k: int
    vocab: int
    hybrid_layers: int
    plain_layers: int
    budget: int = 16
    ratio: int = 4
    index_heads: int = 4


SIZES = {
    "pico": Sizes(32, 4, 2, 16, 32, 8, 3, 320, 5, 3),
    "nano": Sizes(64, 4, 2, 32, 32, 16, 4, 512, 8, 4),
    "q256": Sizes(256, 4, 2, 64, 64, 16, 4, 512, 8, 4),
    # every row but those of the experts' down projection is a multiple of 256 wide
    "q512": Sizes(512, 4, 2, 128, 320, 24, 6, 1024, 8, 4),
}


@dataclass(frozen=True)
class Tiny:
    """What a family function gives.

    centered: see weights.fill; per_expert: how the release stores experts.
    """

    model: Any
    config: Any
    centered: tuple[str, ...] = ()
    streams: bool = False
    per_expert: bool = False


def _common(s: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": s.vocab,
        "hidden_size": s.h,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 7,
    }


def _kinds(n: int) -> list[str]:
    return ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(n)]


def _sections(half: int) -> dict[str, Any]:
    """Three axes of rotary positions over ``half`` pairs."""
    third = max(1, half // 3)
    return {"mrope_section": [half - 2 * third, third, third], "mrope_interleaved": True}


def qwen4_exp(s: Sizes, **more: Any) -> Tiny:
    """Hyper-connections, DeltaNet, block selection, one n-gram layer."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    rotated = s.hd // 4 if s.hd >= 64 else s.hd // 2
    linear_dim = max(16, s.hd // 2)
    settings = {
        **_common(s),
        "num_hidden_layers": s.hybrid_layers,
        "head_dim": s.hd,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "moe_intermediate_size": s.inter,
        "shared_expert_intermediate_size": s.inter,
        "num_experts_per_tok": s.k,
        "num_experts": s.e,
        "hc_count": 4,
        "hc_lowrank": max(16, s.h // 8),
        "ple_layer_ids": [2],
        "ple_embed_dim": s.h,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 4,
        "indexer_n_heads": s.index_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": s.hd,
        "indexer_budget": s.budget,
        "indexer_compress_ratio": s.ratio,
        "output_gate_type": "sigmoid",
        "layer_types": _kinds(s.hybrid_layers),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": rotated / s.hd,
            **_sections(rotated // 2),
        },
    }
    config = Qwen4ExpTextConfig(**(settings | more))
    return Tiny(modeling.Qwen4ExpForCausalLM, config, ("Qwen4ExpTextRMSNorm",), streams=True)


def qwen3_moe(s: Sizes, **more: Any) -> Tiny:
    """Plain attention with query and key norms."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = {
        **_common(s),
        "num_hidden_layers": s.plain_layers,
        "head_dim": s.hd,
        "intermediate_size": 2 * s.h,
        "moe_intermediate_size": s.inter,
        "num_experts": s.e,
        "num_experts_per_tok": s.k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return Tiny(Qwen3MoeForCausalLM, Qwen3MoeConfig(**(settings | more)), per_expert=True)


def _hybrid(s: Sizes) -> dict[str, Any]:
    linear_dim = max(16, s.hd // 2)
    return {
        **_common(s),
        "num_hidden_layers": s.hybrid_layers,
        "head_dim": s.hd,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": s.inter,
        "shared_expert_intermediate_size": s.inter,
        "num_experts": s.e,
        "num_experts_per_tok": s.k,
    }


def qwen3_next(s: Sizes, **more: Any) -> Tiny:
    """DeltaNet with fused projections."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    settings = {
        **_hybrid(s),
        "intermediate_size": 2 * s.h,
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    config = Qwen3NextConfig(**(settings | more))
    return Tiny(Qwen3NextForCausalLM, config, ("Qwen3NextRMSNorm",), per_expert=True)


def qwen3_5_moe(s: Sizes, **more: Any) -> Tiny:
    """DeltaNet with its projections apart, experts stacked and fused."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    settings = {
        **_hybrid(s),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5 if s.hd < 32 else 0.25,
            **_sections(max(4, s.hd // 4) // 2),
        },
    }
    config = Qwen3_5MoeTextConfig(**(settings | more))
    return Tiny(modeling.Qwen3_5MoeForCausalLM, config, ("Qwen3_5MoeRMSNorm",))


def gpt_oss(s: Sizes, **more: Any) -> Tiny:
    """Sliding windows, sinks, biases, YaRN with an unrounded ramp."""
    from transformers import GptOssConfig, GptOssForCausalLM

    settings = {
        **_common(s),
        "num_hidden_layers": s.plain_layers,
        "head_dim": s.hd,
        "intermediate_size": s.inter,
        "num_local_experts": s.e,
        "num_experts_per_tok": s.k,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 1024,
            "truncate": False,
        },
    }
    return Tiny(GptOssForCausalLM, GptOssConfig(**(settings | more)))


def _sigmoid_router(s: Sizes) -> dict[str, Any]:
    return {
        "num_hidden_layers": s.plain_layers,
        "intermediate_size": 2 * s.h,
        "moe_intermediate_size": s.inter,
        "n_routed_experts": s.e,
        "num_experts_per_tok": s.k,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }


def glm4_moe(s: Sizes, **more: Any) -> Tiny:
    """Partial rotary, biases, sigmoid router."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    settings = {
        **_common(s),
        **_sigmoid_router(s),
        "head_dim": s.hd,
        "routed_scaling_factor": 1.7,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    }
    return Tiny(Glm4MoeForCausalLM, Glm4MoeConfig(**(settings | more)), per_expert=True)


def deepseek_v3(s: Sizes, **more: Any) -> Tiny:
    """Latent attention, router with groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = {
        **_common(s),
        **_sigmoid_router(s),
        "num_key_value_heads": s.heads,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
    return Tiny(DeepseekV3ForCausalLM, DeepseekV3Config(**(settings | more)), per_expert=True)


def llama(s: Sizes, **more: Any) -> Tiny:
    """Dense, with the frequency scaling of Llama 3.1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        **_common(s),
        "num_hidden_layers": s.plain_layers,
        "head_dim": s.hd,
        "intermediate_size": 2 * s.h,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    return Tiny(LlamaForCausalLM, LlamaConfig(**(settings | more)))


def qwen2(s: Sizes, **more: Any) -> Tiny:
    """Dense, biases on query, key and value, output head tied to the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {
        **_common(s),
        "num_hidden_layers": s.plain_layers,
        "intermediate_size": 2 * s.h,
        "tie_word_embeddings": True,
    }
    return Tiny(Qwen2ForCausalLM, Qwen2Config(**(settings | more)))


def qwen2_moe(s: Sizes, **more: Any) -> Tiny:
    """Router whose weights are not renormalised, gated shared expert."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    settings = {
        **_common(s),
        "num_hidden_layers": s.plain_layers,
        "intermediate_size": 2 * s.h,
        "moe_intermediate_size": s.inter,
        "shared_expert_intermediate_size": 2 * s.inter,
        "num_experts": s.e,
        "num_experts_per_tok": s.k,
    }
    return Tiny(Qwen2MoeForCausalLM, Qwen2MoeConfig(**(settings | more)), per_expert=True)


FAMILIES: dict[str, Callable[..., Tiny]] = {
    f.__name__: f
    for f in (
        qwen4_exp,
        qwen3_moe,
        qwen3_next,
        qwen3_5_moe,
        gpt_oss,
        glm4_moe,
        deepseek_v3,
        llama,
        qwen2,
        qwen2_moe,
    )
}
