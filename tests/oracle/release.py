"""The layout of a released checkpoint: tensor names, and config.json as it is published."""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle.families import Tiny
from tests.oracle.weights import to_disk


def tensors(
    family: str, tiny: Tiny, model: torch.nn.Module, draft: torch.nn.Module | None
) -> dict[str, torch.Tensor]:
    """Name -> tensor as stored."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if family == "qwen4_exp":
            stored |= _composite(name, tensor, tiny.config.split_ngram_parts)
        elif tiny.per_expert and ".mlp.experts." in name:
            stored |= _per_expert(name, tensor)
        elif not (name == "lm_head.weight" and tiny.config.tie_word_embeddings):
            stored[name] = to_disk(tensor)
    if draft is not None:
        stored |= {"mtp." + name: to_disk(t) for name, t in draft.state_dict().items()}
    return stored


def _composite(name: str, tensor: torch.Tensor, n_shards: int) -> dict[str, torch.Tensor]:
    """Names of a text model inside a composite; the n-gram table in shards."""
    if name.startswith("model."):
        name = name.replace("model.", "model.language_model.", 1)
    if not name.endswith("ngram_embedding.weight"):
        return {name: to_disk(tensor)}
    stem = name.removesuffix("weight")
    shards = tensor.chunk(n_shards, 0)
    return {f"{stem}shard_{i}.weight": to_disk(part) for i, part in enumerate(shards)}


def _per_expert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One tensor per expert and projection."""
    prefix, kind = name.rsplit(".", 1)
    stored = {}
    for expert in range(tensor.shape[0]):
        if kind == "down_proj":
            stored[f"{prefix}.{expert}.down_proj.weight"] = to_disk(tensor[expert])
            continue
        gate, up = tensor[expert].chunk(2, 0)
        stored[f"{prefix}.{expert}.gate_proj.weight"] = to_disk(gate)
        stored[f"{prefix}.{expert}.up_proj.weight"] = to_disk(up)
    return stored


def config(family: str, tiny: Tiny, draft: bool) -> dict[str, Any]:
    """The content of config.json."""
    values: dict[str, Any] = tiny.config.to_dict()
    values.pop("transformers_version", None)
    values["dtype"] = "bfloat16"
    if family == "qwen4_exp":
        return _composite_config(values, draft)
    values["architectures"] = [tiny.model.__name__]
    if family == "deepseek_v3":
        # the release has them, and other loaders need them; transformers drops them
        values |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    return values


def _composite_config(text: dict[str, Any], draft: bool) -> dict[str, Any]:
    # the release says full_attention where transformers says indexed_attention
    text["layer_types"] = [
        "full_attention" if kind == "indexed_attention" else kind for kind in text["layer_types"]
    ]
    text |= {
        "model_type": "qwen4_exp_text",
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": int(draft),
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": text["rope_parameters"]["partial_rotary_factor"],
    }
    n_vocab = text["vocab_size"]
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": text,
        "image_token_id": n_vocab - 4,
        "video_token_id": n_vocab - 3,
        "vision_start_token_id": n_vocab - 6,
        "vision_end_token_id": n_vocab - 5,
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": text["hidden_size"],
        },
    }
