"""A tiny qwen3_moe of any size: drawn weights, its files in both formats, and a plain forward pass.

The forward pass is the reference of the cases: float64, all experts at hand, one sequence at once,
written from the architecture's description and sharing no code with the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from tests.formats.gguf_writer import BF16, F16, F32, Key, Tensor, gguf_bytes

Weights = dict[str, torch.Tensor]
PROJS = ("gate", "up", "down")
EPS, THETA = 1e-6, 10000.0
CONTROL = ("<|begin|>", "<|role|>", "<|end|>")
"""Control tokens; ids 256 to 258. The first begins a text, the last ends an answer."""
N_TEXT = 256
TEMPLATE = (
    "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """d hidden, ff expert width; the rest as named."""

    layers: int = 2
    experts: int = 8
    active: int = 2
    d: int = 32
    ff: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 288
    context: int = 4096


def draw(sizes: Sizes, seed: int = 5, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights by their HF names, one tensor per expert, exact in bfloat16."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int, std: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, cols, generator=g) * std / cols**0.5
        return drawn.to(torch.bfloat16).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(width, generator=g)).to(torch.bfloat16).to(dtype)

    n_q, n_kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    found = {"model.embed_tokens.weight": matrix(sizes.vocab, sizes.d, sizes.d**0.5)}
    for layer in range(sizes.layers):
        top = f"model.layers.{layer}."
        found |= {
            top + "input_layernorm.weight": norm(sizes.d),
            top + "post_attention_layernorm.weight": norm(sizes.d),
            top + "self_attn.q_proj.weight": matrix(n_q, sizes.d),
            top + "self_attn.k_proj.weight": matrix(n_kv, sizes.d),
            top + "self_attn.v_proj.weight": matrix(n_kv, sizes.d),
            top + "self_attn.o_proj.weight": matrix(sizes.d, n_q),
            top + "self_attn.q_norm.weight": norm(sizes.head_dim),
            top + "self_attn.k_norm.weight": norm(sizes.head_dim),
            top + "mlp.gate.weight": matrix(sizes.experts, sizes.d, 2.0),
        }
        for e in range(sizes.experts):
            for proj in PROJS:
                shape = (sizes.d, sizes.ff) if proj == "down" else (sizes.ff, sizes.d)
                found[f"{top}mlp.experts.{e}.{proj}_proj.weight"] = matrix(*shape, 1.5)
    return found | {
        "model.norm.weight": norm(sizes.d),
        "lm_head.weight": matrix(sizes.vocab, sizes.d, 2.0),
    }


def config(sizes: Sizes, **more: Any) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": sizes.d,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.active,
        "moe_intermediate_size": sizes.ff,
        "intermediate_size": sizes.ff,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.context,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "eos_token_id": N_TEXT + 2,
        **more,
    }


def write_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any], n_files: int = 1
) -> Path:
    """A safetensors folder: one file, or several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if n_files == 1:
        save_file(dict(tensors), str(folder / "model.safetensors"))
        return folder
    weight_map: dict[str, str] = {}
    for i, names in enumerate(_shares(list(tensors), n_files)):
        file = f"model-{i + 1:05d}-of-{n_files:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, str(folder / file))
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _shares(names: list[str], n: int) -> list[list[str]]:
    per = -(-len(names) // n)
    return [names[i : i + per] for i in range(0, len(names), per)]


def stacked(tensors: Weights, sizes: Sizes, *, fused: bool) -> Weights:
    """The same with one 3-D tensor a projection; or gate and up in one."""
    kept = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(sizes.layers):
        top = f"model.layers.{layer}.mlp.experts."
        piles = {
            p: torch.stack([tensors[f"{top}{e}.{p}_proj.weight"] for e in range(sizes.experts)])
            for p in PROJS
        }
        if fused:
            kept[top + "gate_up_proj"] = torch.cat([piles["gate"], piles["up"]], 1)
            kept[top + "down_proj"] = piles["down"]
        else:
            kept |= {f"{top}{p}_proj.weight": pile for p, pile in piles.items()}
    return kept


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
}
_GGUF_TYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}


def gguf_name(name: str) -> str:
    """The GGUF name of a HF name."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    words = part.split(".")
    if words[:2] == ["mlp", "experts"] and words[2].isdigit():
        return f"blk.{layer}.ffn_{words[3].removesuffix('_proj')}.{words[2]}.weight"
    if part == "mlp.experts.down_proj":
        return f"blk.{layer}.ffn_down_exps.weight"
    return f"blk.{layer}.{_GGUF_PARTS[part]}.weight"


def gguf_tensor(name: str, tensor: torch.Tensor) -> Tensor:
    """A tensor for the GGUF writer, under its GGUF name; rotary rows need no change for qwen3."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(gguf_name(name), tuple(tensor.shape)[::-1], _GGUF_TYPES[tensor.dtype], raw)


def gguf_keys(sizes: Sizes, *, text: bool = True, template: str | None = TEMPLATE) -> list[Key]:
    """Settings, and a byte-level vocabulary with three control tokens."""
    p = "qwen3moe."
    keys: list[Key] = [
        ("general.architecture", "str", "qwen3moe"),
        (p + "block_count", "u32", sizes.layers),
        (p + "context_length", "u32", sizes.context),
        (p + "embedding_length", "u32", sizes.d),
        (p + "feed_forward_length", "u32", sizes.ff),
        (p + "attention.head_count", "u32", sizes.heads),
        (p + "attention.head_count_kv", "u32", sizes.kv_heads),
        (p + "attention.key_length", "u32", sizes.head_dim),
        (p + "attention.value_length", "u32", sizes.head_dim),
        (p + "attention.layer_norm_rms_epsilon", "f32", EPS),
        (p + "rope.freq_base", "f32", THETA),
        (p + "expert_count", "u32", sizes.experts),
        (p + "expert_used_count", "u32", sizes.active),
        (p + "expert_feed_forward_length", "u32", sizes.ff),
    ]
    if not text:
        return keys
    words = vocabulary(sizes.vocab)
    control = range(N_TEXT, N_TEXT + len(CONTROL))
    keys += [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "qwen2"),
        ("tokenizer.ggml.tokens", "array", ("str", words)),
        (
            "tokenizer.ggml.token_type",
            "array",
            ("i32", [3 if i in control else 1 for i in range(sizes.vocab)]),
        ),
        ("tokenizer.ggml.merges", "array", ("str", [])),
        ("tokenizer.ggml.bos_token_id", "u32", N_TEXT),
        ("tokenizer.ggml.eos_token_id", "u32", N_TEXT + 2),
        ("tokenizer.ggml.add_bos_token", "bool", False),
    ]
    if template is not None:
        keys.append(("tokenizer.chat_template", "str", template))
    return keys


def write_gguf(path: Path, tensors: Mapping[str, torch.Tensor], keys: Sequence[Key]) -> Path:
    """One GGUF file; tensors by their HF names."""
    path.write_bytes(gguf_bytes(keys, [gguf_tensor(n, t) for n, t in tensors.items()]))
    return path


def write_gguf_parts(
    folder: Path,
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    keys: Sequence[Key],
    n_parts: int,
) -> list[Path]:
    """A split set; architecture and vocabulary in the first part only."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [gguf_tensor(n, t) for n, t in tensors.items()]
    paths = []
    for i, names in enumerate(_shares([t.name for t in made], n_parts)):
        split: list[Key] = [
            ("split.no", "u16", i),
            ("split.count", "u16", n_parts),
            ("split.tensors.count", "i32", len(made)),
        ]
        here = [t for t in made if t.name in set(names)]
        path = folder / f"{stem}-{i + 1:05d}-of-{n_parts:05d}.gguf"
        path.write_bytes(gguf_bytes([*(keys if i == 0 else ()), *split], here))
        paths.append(path)
    return paths


def vocabulary(n: int) -> list[str]:
    """Byte letters, the control tokens, then words nobody writes."""
    letters = sorted(ByteLevel.alphabet())
    return [*letters, *CONTROL, *(f"<unused{i}>" for i in range(n - N_TEXT - len(CONTROL)))]


def write_tokenizer(folder: Path, n_vocab: int, **settings: Any) -> None:
    """tokenizer.json and tokenizer_config.json of the same vocabulary."""
    words = vocabulary(n_vocab)
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in CONTROL])
    made.save(str(folder / "tokenizer.json"))
    base = {"bos_token": CONTROL[0], "eos_token": CONTROL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | settings))


def forward(tensors: Weights, sizes: Sizes, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits float64 [T, V], margin [T]): the least distance of any router choice of a token from
    another choice, as a share of the largest router logit."""
    with torch.no_grad():
        w = {name: t.to(torch.float64) for name, t in tensors.items()}
        x_TD = w["model.embed_tokens.weight"][torch.tensor(list(ids))]
        margin = np.full(len(ids), np.inf)
        for layer in range(sizes.layers):
            get: Callable[[str], torch.Tensor] = _layer(w, layer)
            x_TD = x_TD + _attention(get, sizes, _norm(x_TD, get("input_layernorm.weight")))
            h_TD = _norm(x_TD, get("post_attention_layernorm.weight"))
            out_TD, near = _experts(get, sizes, h_TD)
            x_TD = x_TD + out_TD
            margin = np.minimum(margin, near.numpy())
        x_TD = _norm(x_TD, w["model.norm.weight"])
        return (x_TD @ w["lm_head.weight"].T).numpy(), margin


def _layer(w: Weights, layer: int) -> Callable[[str], torch.Tensor]:
    return lambda name: w[f"model.layers.{layer}.{name}"]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _rope(x_THD: torch.Tensor) -> torch.Tensor:
    n, half = x_THD.shape[0], x_THD.shape[-1] // 2
    freq = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(n, dtype=torch.float64)[:, None] * freq)[:, None]
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _attention(
    get: Callable[[str], torch.Tensor], sizes: Sizes, x_TD: torch.Tensor
) -> torch.Tensor:
    n = len(x_TD)
    q, k, v = (
        (x_TD @ get(f"self_attn.{p}_proj.weight").T).view(n, -1, sizes.head_dim) for p in "qkv"
    )
    q = _rope(_norm(q, get("self_attn.q_norm.weight")))
    k = _rope(_norm(k, get("self_attn.k_norm.weight")))
    share = sizes.heads // sizes.kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
    outs = []
    for head in range(sizes.heads):
        score = q[:, head] @ k[:, head].T * sizes.head_dim**-0.5 + mask
        outs.append(torch.softmax(score, -1) @ v[:, head])
    return torch.cat(outs, -1) @ get("self_attn.o_proj.weight").T


def _experts(
    get: Callable[[str], torch.Tensor], sizes: Sizes, h_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE = h_TD @ get("mlp.gate.weight").T
    ranked = logits_TE.sort(-1, descending=True)
    near = torch.full((len(h_TD),), torch.inf, dtype=torch.float64)
    if sizes.active < sizes.experts:
        gap = ranked.values[:, sizes.active - 1] - ranked.values[:, sizes.active]
        near = gap / logits_TE.abs().max()
    weight = torch.softmax(ranked.values[:, : sizes.active], -1)  # renormalised over the chosen
    out = torch.zeros_like(h_TD)
    for e in range(sizes.experts):
        token, rank = (ranked.indices[:, : sizes.active] == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        gate, up, down = (get(f"mlp.experts.{e}.{p}_proj.weight") for p in PROJS)
        y = torch.nn.functional.silu(h_TD[token] @ gate.T) * (h_TD[token] @ up.T) @ down.T
        out.index_add_(0, token, y * weight[token, rank, None])
    return out, near
