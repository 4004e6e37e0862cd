"""What a family is to the rest of the program, and the facts that every family reads the same way.

A family file states how one architecture's settings become a ModelSpec and how its tensors are
named; nothing else in the program knows architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.core.errors import FormatError
from strata.formats.checkpoint import Checkpoint
from strata.models.config import MOST_TOKENS, Config
from strata.models.expert_source import ExpertSource
from strata.models.sources import Sources
from strata.models.spec import (
    AttentionSpec,
    GdnSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NgramSpec,
)


@dataclass(frozen=True)
class Dialect:
    """How one architecture is read from one kind of file.

    spec(ckpt), sources(ckpt, spec) and experts(ckpt, spec): settings, dense weights, routed
    experts.
    """

    spec: Callable[[Checkpoint], ModelSpec]
    sources: Callable[[Checkpoint, ModelSpec], Sources]
    experts: Callable[[Checkpoint, ModelSpec], ExpertSource]


@dataclass(frozen=True)
class Family:
    """One architecture.

    ``architectures`` and ``model_types`` are those of config.json, ``gguf_names`` of GGUF files.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf_names: tuple[str, ...]
    hf: Dialect
    gguf: Dialect

    def _dialect(self, ckpt: Checkpoint) -> Dialect:
        return self.gguf if ckpt.format == "gguf" else self.hf

    def spec(self, ckpt: Checkpoint) -> ModelSpec:
        """The model's settings; refusals name file, key, value and what is expected."""
        return self._dialect(ckpt).spec(ckpt)

    def sources(self, ckpt: Checkpoint, spec: ModelSpec) -> Sources:
        """Where each dense weight lies."""
        return self._dialect(ckpt).sources(ckpt, spec)

    def expert_source(self, ckpt: Checkpoint, spec: ModelSpec) -> ExpertSource:
        """Where the routed experts lie; no layers for a model without."""
        return self._dialect(ckpt).experts(ckpt, spec)


@dataclass(frozen=True)
class Trunk:
    """What every architecture's settings say in the same words."""

    n_layers: int
    d_model: int
    n_vocab: int
    norm_eps: float
    max_context_tokens: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    tied_head: bool
    eos_tokens: tuple[int, ...]

    def spec(
        self, family: str, layers: Sequence[LayerSpec], *, streams: int = 1, hc_rank: int = 0
    ) -> ModelSpec:
        """The whole model from its layers; FormatError for counts that cannot be."""
        for layer in layers:
            _check_layer(layer)
        return ModelSpec(
            family=family,
            d_model=self.d_model,
            n_vocab=self.n_vocab,
            layers=tuple(layers),
            norm_eps=self.norm_eps,
            max_context_tokens=self.max_context_tokens,
            streams=streams,
            hc_rank=hc_rank,
            tied_head=self.tied_head,
            eos_tokens=self.eos_tokens,
        )


def _check_layer(layer: LayerSpec) -> None:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, AttentionSpec) and mixer.n_heads % mixer.n_kv_heads:
        raise FormatError(
            f"{mixer.n_heads} query heads cannot share {mixer.n_kv_heads} key heads evenly; "
            f"the model's settings contradict themselves"
        )
    if isinstance(mixer, GdnSpec) and mixer.n_v_heads % mixer.n_k_heads:
        raise FormatError(
            f"{mixer.n_v_heads} value heads cannot share {mixer.n_k_heads} key heads evenly; "
            f"the model's settings contradict themselves"
        )
    if layer.ngram is not None:
        _check_ngram(layer.ngram)
    if not isinstance(ffn, MoeSpec):
        return
    if ffn.n_experts % ffn.n_groups or ffn.groups_kept > ffn.n_groups:
        raise FormatError(
            f"{ffn.n_experts} experts cannot lie in {ffn.n_groups} equal groups of which "
            f"{ffn.groups_kept} are kept; the model's settings contradict themselves"
        )
    if ffn.n_active > ffn.n_experts // ffn.n_groups * ffn.groups_kept:
        raise FormatError(
            f"{ffn.n_active} experts per token cannot be chosen from {ffn.n_experts} in "
            f"{ffn.n_groups} groups of which {ffn.groups_kept} are kept; "
            f"the model's settings contradict themselves"
        )


def _check_ngram(ngram: NgramSpec) -> None:
    n_heads = ngram.heads_per_ngram * (ngram.ngram_size - 1)
    lengths = (len(ngram.multipliers), len(ngram.head_vocab), len(ngram.head_offset))
    if lengths != (ngram.ngram_size, n_heads, n_heads):
        raise FormatError(
            f"n-grams of {ngram.ngram_size} tokens with {ngram.heads_per_ngram} heads each need "
            f"{ngram.ngram_size} multipliers, {n_heads} head sizes and {n_heads} head offsets, not "
            f"{lengths[0]}, {lengths[1]} and {lengths[2]}; the model's settings contradict "
            f"themselves"
        )
    numbers = (*ngram.multipliers, *ngram.head_offset, *(n - 1 for n in ngram.head_vocab))
    if not all(0 <= n < 1 << 63 for n in numbers):
        raise FormatError(
            "an n-gram multiplier, head size or head offset is out of range; the model's settings "
            "contradict themselves"
        )


def hf_config(ckpt: Checkpoint) -> Config:
    """The language model's part of config.json."""
    config = Config(ckpt.config, f"{ckpt.root}/config.json")
    return config.section("text_config") if config.has("text_config") else config


def gguf_config(ckpt: Checkpoint) -> Config:
    """The metadata under the architecture's prefix."""
    architecture = ckpt.metadata.get("general.architecture")
    return Config(ckpt.metadata, str(ckpt.paths[0]), f"{architecture}.")


def hf_trunk(ckpt: Checkpoint, config: Config) -> Trunk:
    """Common settings of a config.json. ``hidden_act`` other than silu is refused."""
    config.require("hidden_act", "silu")
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    outer = Config(ckpt.config, config.where)
    ties = [c.flag("tie_word_embeddings", False) for c in (config, outer)]
    return Trunk(
        n_layers=_layers(ckpt, config.size("num_hidden_layers"), config.where),
        d_model=d_model,
        n_vocab=config.size("vocab_size", most=MOST_TOKENS),
        norm_eps=config.positive("rms_norm_eps", default=1e-6),
        max_context_tokens=config.size("max_position_embeddings", most=MOST_TOKENS),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", default=n_heads),
        head_dim=config.size("head_dim", default=max(1, d_model // n_heads)),
        tied_head=any(ties) and "lm_head.weight" not in ckpt.tensors,
        eos_tokens=_hf_eos(ckpt, config),
    )


def _layers(ckpt: Checkpoint, n_layers: int, where: str) -> int:
    """The number of layers, which must be credible: every layer has tensors of its own."""
    if not 1 <= n_layers <= len(ckpt.tensors):
        raise FormatError(
            f"{where}: {n_layers} layers cannot be in a file of {len(ckpt.tensors)} tensors; "
            f"settings and weights belong to different models"
        )
    return n_layers


def _hf_eos(ckpt: Checkpoint, config: Config) -> tuple[int, ...]:
    generation = Config(ckpt.generation_config, f"{ckpt.root}/generation_config.json")
    tokens: list[int] = []
    for source in (generation, config):
        tokens += source.whole_numbers("eos_token_id") or ()
    return tuple(dict.fromkeys(tokens))


def gguf_trunk(ckpt: Checkpoint, meta: Config) -> Trunk:
    """Common settings of a GGUF.

    Draft (NextN) layers are not counted; a file without output head is tied.
    """
    d_model, n_heads = meta.size("embedding_length"), meta.size("attention.head_count")
    n_layers = meta.size("block_count") - meta.count("nextn_predict_layers", default=0)
    embed = ckpt.tensors.get("token_embd.weight")
    if embed is not None:
        n_vocab = embed.n_rows
    else:
        n_vocab = meta.size("vocab_size", default=len(_tokens(ckpt)), most=MOST_TOKENS)
    return Trunk(
        n_layers=_layers(ckpt, n_layers, meta.where),
        d_model=d_model,
        n_vocab=n_vocab,
        norm_eps=meta.positive("attention.layer_norm_rms_epsilon"),
        max_context_tokens=meta.size("context_length", most=MOST_TOKENS),
        n_heads=n_heads,
        n_kv_heads=meta.size("attention.head_count_kv", default=n_heads),
        head_dim=meta.size("attention.key_length", default=max(1, d_model // n_heads)),
        tied_head="output.weight" not in ckpt.tensors,
        eos_tokens=_gguf_eos(ckpt),
    )


def _tokens(ckpt: Checkpoint) -> Sequence[object]:
    tokens = ckpt.metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, Sequence) else ()


def _gguf_eos(ckpt: Checkpoint) -> tuple[int, ...]:
    meta = Config(ckpt.metadata, str(ckpt.paths[0]), "tokenizer.ggml.")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(meta.count(key) for key in keys if meta.has(key)))
