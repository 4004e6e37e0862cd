"""What a model is, as frozen data: the one place that every architecture's config is translated
into.

Knows no tensors, no files and no caches. A family file (``models/<family>.py``) turns a config.json
or GGUF
metadata into a ModelSpec; parts (``models/attention.py`` ...) are built from it.
Weights are named by *roles*; the role names of each part are listed in that part's spec below. A
role is
"layers.<l>.<role>" inside a layer and "<role>" for the model-level ones: embed, head, final_norm
(plain residual) or
head_read.{norm,down,up} (hyper-connections).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding with its frequencies already worked out (scaling included)."""

    inv_freq: tuple[float, ...]
    """One per rotated pair; the first 2 * len(inv_freq) dims of a head are rotated, the rest pass
    through."""
    pairing: Literal["half", "pairs"]
    """"half": dim i pairs with i + n/2 (HF, NEOX). "pairs": dim 2i with 2i + 1 (llama GGUF,
    DeepSeek)."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN)."""


@dataclass(frozen=True)
class IndexerSpec:
    """QSA block selection. Roles: index.q, index.k (Weights), index.q_norm, index.k_norm (full
    weights)."""

    n_heads: int
    head_dim: int
    budget_tokens: int
    block_tokens: int


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention.

    Roles: attn.q, attn.k, attn.v, attn.o (Weights); attn.{q,k,v,o}_bias when bias/o_bias;
    attn.q_norm, attn.k_norm
    (width head_dim, *full* weights, i.e. 1 + w already applied) when qk_norm; attn.sinks [n_heads]
    when sinks.
    With gate, attn.q has rows [query | gate] interleaved per head (2 * head_dim rows a head).
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    scale: float
    bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    gate: bool = False
    sinks: bool = False
    window_tokens: int | None = None
    """Sliding window: a query sees itself and the window_tokens - 1 tokens before it. None: all."""
    indexer: IndexerSpec | None = None


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek V2/V3).

    Roles: mla.q (when q_lora_rank is None) or mla.q_a, mla.q_a_norm, mla.q_b; mla.kv_a [kv_lora +
    rope, D];
    mla.kv_a_norm; mla.k_b [H * nope, kv_lora] and mla.v_b [H * v_dim, kv_lora] (Weights or f32
    tensors); mla.o.
    """

    n_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rotary: RotarySpec
    scale: float


@dataclass(frozen=True)
class GdnSpec:
    """Gated DeltaNet.

    Roles: gdn.qkv, gdn.z, gdn.a, gdn.b, gdn.out (Weights); gdn.conv [channels, taps] f32 (tap -1 =
    current token);
    gdn.decay [v heads] f32 = -exp(A_log); gdn.dt_bias [v heads]; gdn.norm [v dim] (plain weight).
    """

    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int
    conv_taps: int
    head_order: Literal["grouped", "interleaved"]
    """Key head of value head i: "grouped" i // (nv/nk) (HF), "interleaved" i % nk (GGUF)."""
    output_gate: Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class NgramSpec:
    """The n-gram (PLE) block that runs before a layer's attention read.

    Roles: ngram.key, ngram.value (Weights); ngram.norm_key, ngram.norm_query, ngram.norm_conv
    (full weights); ngram.conv [C * D, taps]; ngram.table (Weight [rows, head_dim], memory-mapped).
    """

    ngram_size: int
    heads_per_ngram: int
    head_dim: int
    conv_taps: int
    dilation: int
    multipliers: tuple[int, ...]
    head_vocab: tuple[int, ...]
    head_offset: tuple[int, ...]
    eos_token: int


@dataclass(frozen=True)
class MoeSpec:
    """Router and routed experts (plus the optional shared expert).

    Roles: moe.router (Weight [E, D]); moe.router_bias [E] when router_bias (added to the logits);
    moe.correction [E] when correction (added to the scores for selection only);
    shared.gate, shared.up, shared.down (Weights) when shared_width; shared.gate_inp (Weight [1, D])
    when shared_gate.
    Routed experts are not roles: they come through an ExpertSource.
    """

    n_experts: int
    n_active: int
    width: int
    scoring: Literal["softmax", "sigmoid", "softmax_topk"]
    """"softmax": over all experts, then top-k. "softmax_topk": top-k of logits, then softmax over
    those."""
    normalize: bool
    """Divide the top-k weights by their sum."""
    scale: float = 1.0
    router_bias: bool = False
    correction: bool = False
    n_groups: int = 1
    groups_kept: int = 1
    activation: Literal["silu", "swiglu_oai"] = "silu"
    swiglu_limit: float = 7.0
    expert_bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class DenseFfnSpec:
    """Gated feed-forward without routing. Roles: ffn.gate, ffn.up, ffn.down."""

    width: int


MixerSpec = AttentionSpec | MlaSpec | GdnSpec
FfnSpec = MoeSpec | DenseFfnSpec


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its mixer, its FFN half, and the n-gram block in front of it if any.

    Roles of the reads: attn_norm, ffn_norm [D] (plain residual, full weights), or
    attn_read.{norm [C*D], down, up, inject} and ffn_read.{...} (hyper-connections).
    """

    mixer: MixerSpec
    ffn: FfnSpec
    ngram: NgramSpec | None = None


@dataclass(frozen=True)
class ModelSpec:
    """The whole network. Token ids in, logits [T, V] out."""

    family: str
    d_model: int
    n_vocab: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context_tokens: int
    streams: int = 1
    """Residual streams C; 1 = plain residual, > 1 = hyper-connections."""
    hc_rank: int = 0
    tied_head: bool = False
    eos_tokens: tuple[int, ...] = ()

    @property
    def n_layers(self) -> int:
        """Number of trunk layers (draft layers are not counted)."""
        return len(self.layers)
