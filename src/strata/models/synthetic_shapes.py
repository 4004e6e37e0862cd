"""Published models as shapes: GGUF metadata and the weight type of every tensor. Data only.

qwen4_exp-125b:IQ3_S   expert types per layer as in the published GSQ-RCO IQ3_S file; that file's
                       dense types are not public, so Q6_K attention and BF16 small projections
                       stand in, as in the llama.cpp baselines of bench/. The 28.8 GB n-gram table
                       is cut to 320,000 rows: its reads from disk are not measured.
qwen3-30b-a3b:Q4_K_M   Q4_K, with Q6_K for the down matrices of even layers and the output.
gpt-oss-120b:MXFP4     MXFP4 experts, Q8_0 elsewhere.
glm-4.5-air:Q4_K       Q4_K; rows of 1408 and 10944 weights are no whole blocks of it: Q5_0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strata.models.ngram import ngram_constants


@dataclass(frozen=True)
class Sizes:
    """What can be scaled down. active: experts a token takes."""

    layers: int
    experts: int
    vocab: int
    active: int


@dataclass(frozen=True)
class Shape:
    """One model in one file type.

    types: stem of a tensor's name -> weight type, "*" for all others. expert_types: layer -> types
    of gate, up and down. settings: sizes -> the metadata under the architecture's prefix. shows:
    tensors that the family looks for when it reads settings.
    """

    architecture: str
    sizes: Sizes
    types: Mapping[str, str]
    expert_types: Callable[[int], tuple[str, str, str]]
    settings: Callable[[Sizes], dict[str, Any]]
    shows: tuple[str, ...] = ()
    dense_layers: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self, sizes: Sizes) -> dict[str, Any]:
        """All GGUF keys. There is no vocabulary, so text is off."""
        own = {f"{self.architecture}.{key}": value for key, value in self.settings(sizes).items()}
        return {
            "general.architecture": self.architecture,
            "tokenizer.ggml.model": "none",
            **own,
            f"{self.architecture}.block_count": sizes.layers,
            f"{self.architecture}.expert_count": sizes.experts,
            f"{self.architecture}.expert_used_count": sizes.active,
        }


_IQ3_XXS = {0, 7, 14, 16, 18, 22, 31, 33, 37, 38, 41, 42, 43, 46, 12, 20, 30}
_IQ3_S = {17, 25, 27, 28, 29, 35, 40, 44, 45, 21}
_DOWN_Q2_0 = {1, 8, 10, 12, 13, 20, 21, 30, 36}


def _qwen4_experts(layer: int) -> tuple[str, str, str]:
    """The published census of the IQ3_S file, by layer."""
    kind = "IQ2_S"
    if layer in _IQ3_XXS:
        kind = "IQ3_XXS"
    elif layer in _IQ3_S:
        kind = "IQ3_S"
    elif layer == 47:
        kind = "IQ4_XS"
    return kind, kind, "Q2_0" if layer in _DOWN_Q2_0 else "IQ4_NL"


def _qwen4_settings(sizes: Sizes) -> dict[str, Any]:
    ngram = ngram_constants(
        n_vocab=sizes.vocab, ngram_size=3, heads_per_ngram=8, vocab_base=20_000, divisible_by=128,
        seed=1234,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "context_length": 262144, "embedding_length": 2560, "attention.head_count": 24,
        "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7,
        "expert_feed_forward_length": 640, "expert_shared_feed_forward_length": 640,
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
        "ssm.time_step_rank": 48, "ssm.inner_size": 6144, "full_attention_interval": 4,
        "hyper_connection.count": 4, "hyper_connection.low_rank": 320,
        "attention.indexer.head_count": 4, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "attention.compress_ratios": [4 if i % 4 == 3 else 0 for i in range(sizes.layers)],
    }  # fmt: skip
    if sizes.layers > 1:
        settings |= {
            "ple.layers": [1], "ple.ngram_size": 3, "ple.heads_per_ngram": 8,
            "ple.conv_kernel": 4, "ple.eos_token_id": min(248044, sizes.vocab - 1),
            "ple.layer_multipliers": list(ngram.multipliers),
            "ple.head_vocab_sizes": list(ngram.head_vocab),
            "ple.head_offsets": list(ngram.head_offset),
            "embedding_length_per_layer_input": 160,
        }  # fmt: skip
    return settings


_BF16 = dict.fromkeys((
    "hc_attn_down", "hc_attn_up", "hc_attn_inject", "hc_ffn_down", "hc_ffn_up", "hc_ffn_inject",
    "output_hc_down", "output_hc_up", "ssm_alpha", "ssm_beta", "indexer.q_proj", "indexer.k_proj",
    "ffn_gate_inp", "ffn_gate_inp_shexp", "ple_key", "ple_value",
), "BF16")  # fmt: skip

SHAPES: Mapping[str, Shape] = {
    "qwen4_exp-125b:IQ3_S": Shape(
        "qwen4exp",
        Sizes(48, 512, 248320, 10),
        {**_BF16, "token_embd": "IQ3_S", "output": "Q6_K", "per_layer_token_embd": "IQ4_NL",
         "ffn_down_shexp": "Q8_0", "*": "Q6_K"},
        _qwen4_experts,
        _qwen4_settings,
    ),
    "qwen3-30b-a3b:Q4_K_M": Shape(
        "qwen3moe",
        Sizes(48, 128, 151936, 8),
        {"token_embd": "Q4_K", "output": "Q6_K", "ffn_gate_inp": "F32", "*": "Q4_K"},
        lambda layer: ("Q4_K", "Q4_K", "Q4_K" if layer % 2 else "Q6_K"),
        lambda sizes: {
            "context_length": 40960, "embedding_length": 2048, "attention.head_count": 32,
            "attention.head_count_kv": 4, "attention.key_length": 128,
            "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6, "expert_feed_forward_length": 768,
        },
    ),
    "gpt-oss-120b:MXFP4": Shape(
        "gpt-oss",
        Sizes(36, 128, 201088, 4),
        {"token_embd": "Q8_0", "output": "Q8_0", "ffn_gate_inp": "F32", "*": "Q8_0"},
        lambda layer: ("MXFP4", "MXFP4", "MXFP4"),
        lambda sizes: {
            "context_length": 131072, "embedding_length": 2880, "attention.head_count": 64,
            "attention.head_count_kv": 8, "attention.key_length": 64,
            "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.sliding_window": 128, "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096, "expert_feed_forward_length": 2880,
        },
    ),
    "glm-4.5-air:Q4_K": Shape(
        "glm4moe",
        Sizes(46, 128, 151552, 8),
        {"token_embd": "Q4_K", "output": "Q6_K", "ffn_gate_inp": "F32", "ffn_down": "Q5_0",
         "ffn_down_shexp": "Q5_0", "*": "Q4_K"},
        lambda layer: ("Q4_K", "Q4_K", "Q5_0"),
        lambda sizes: {
            "context_length": 131072, "embedding_length": 4096, "attention.head_count": 96,
            "attention.head_count_kv": 8, "attention.key_length": 128,
            "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 64, "rope.freq_base": 1e6, "feed_forward_length": 10944,
            "expert_feed_forward_length": 1408, "expert_shared_count": 1,
            "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        },
        shows=("blk.0.attn_q.bias",),
        dense_layers=1,
    ),
}  # fmt: skip
