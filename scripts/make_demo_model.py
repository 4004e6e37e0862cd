#!/usr/bin/env python3
"""Writes a `qwen4_exp` safetensors checkpoint as a Q8_0 GGUF: how models/tiny-flash-next-Q8_0.gguf
was made.

    python scripts/make_demo_model.py CHECKPOINT_FOLDER OUT.gguf

Large projections, experts, embedding and head become Q8_0; what published files of this
architecture keep wide
(hyper-connections, router, alpha/beta, indexer, n-gram table) stays BF16; vectors are F32. Needs
the `gguf` package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

from strata.formats.checkpoint import Checkpoint, open_checkpoint
from strata.formats.quants import quantize_q8_0

ARCH = "qwen4exp"
PREFIX = "model.language_model."
HYPER = {
    "hc_norm.weight": "norm",
    "input_mix_weight_down.weight": "down",
    "input_mix_weight_up.weight": "up",
    "block_inject_weight.weight": "inject",
}
PLAIN = {  # HF name inside a layer -> GGUF name inside a block
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "ple.key_proj": "ple_key", "ple.value_proj": "ple_value",
}  # fmt: skip
WIDE = ("hc_", "ffn_gate_inp", "ssm_alpha", "ssm_beta", "indexer", "per_layer_token_embd")
PLUS_ONE = {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm", "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query", "ple.norm_conv": "ple_norm_conv",
}  # fmt: skip


class Writer:
    """Adds tensors in the type their GGUF name calls for."""

    def __init__(self, out: Path) -> None:
        self.file = gguf.GGUFWriter(str(out), ARCH)

    def matrix(self, name: str, x: np.ndarray) -> None:
        """Q8_0, or BF16 where published files keep it (or where rows are no whole blocks)."""
        if any(w in name for w in WIDE) or x.shape[-1] % 32:
            raw = bf16(x)
            self.file.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
            return
        rows = quantize_q8_0(x.reshape(-1, x.shape[-1]))
        raw = rows.reshape(*x.shape[:-1], rows.shape[-1])
        self.file.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def vector(self, name: str, x: np.ndarray) -> None:
        """F32."""
        self.file.add_tensor(name, np.ascontiguousarray(x, dtype=np.float32))


def bf16(x: np.ndarray) -> np.ndarray:
    """The upper halves of f32 values (exact for BF16 sources), as bytes of the last axis."""
    upper = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return upper.view(np.uint8)


def metadata(w: gguf.GGUFWriter, c: dict, ck: Checkpoint) -> None:
    """Architecture keys as llama.cpp's converter names them."""
    gdn_width = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    rope = c["rope_parameters"]
    numbers = {
        "block_count": c["num_hidden_layers"], "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"], "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"], "expert_count": c["num_experts"],
        "rope.dimension_count": int(c["head_dim"] * rope["partial_rotary_factor"]),
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["shared_expert_intermediate_size"],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"], "ssm.inner_size": gdn_width,
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "full_attention_interval": c["full_attention_interval"],
        "hyper_connection.count": c["hc_count"], "hyper_connection.low_rank": c["hc_lowrank"],
        "attention.indexer.head_count": c["indexer_n_heads"],
        "attention.indexer.key_length": c["indexer_head_dim"],
        "attention.indexer.top_k": c["indexer_budget"], "ple.ngram_size": c["ngram_size"],
        "ple.heads_per_ngram": c["heads_per_ngram"], "ple.conv_kernel": c["ple_conv_kernel_size"],
        "ple.eos_token_id": c["eos_token_id"],
    }  # fmt: skip
    for key, value in numbers.items():
        w.add_uint32(f"{ARCH}.{key}", int(value))
    w.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", c["rms_norm_eps"])
    w.add_float32(f"{ARCH}.rope.freq_base", rope["rope_theta"])
    w.add_array(f"{ARCH}.rope.dimension_sections", [*rope["mrope_section"], 0])
    full = [t == "full_attention" for t in c["layer_types"]]
    ratio = c["indexer_compress_ratio"]
    w.add_array(f"{ARCH}.attention.compress_ratios", [ratio if f else 0 for f in full])
    w.add_array(f"{ARCH}.ple.layers", [i - 1 for i in c["ple_layer_ids"]])
    base = f"{PREFIX}layers.{c['ple_layer_ids'][0] - 1}.ple.ple_embedding."
    for key, leaf in (
        ("layer_multipliers", "layer_multipliers"),
        ("head_offsets", "ngram_heads_offsets"),
        ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
    ):
        values = [int(v) for v in ck.array(base + leaf)]
        w.add_key_value(
            f"{ARCH}.ple.{key}", values, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
        )
    w.add_uint32(
        f"{ARCH}.embedding_length_per_layer_input",
        c["ple_embed_dim"] // ((c["ngram_size"] - 1) * c["heads_per_ngram"]),
    )


def tokenizer(w: gguf.GGUFWriter, folder: Path, generation: dict) -> None:
    """A byte-level BPE with the qwen2 splitting rule."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = dict(data["model"]["vocab"])
    special = {t["content"]: t["id"] for t in data["added_tokens"]}
    vocab |= special
    tokens = [""] * len(vocab)
    for text, index in vocab.items():
        tokens[index] = text
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types([3 if t in special else 1 for t in tokens])
    merges = data["model"]["merges"]
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    ends = generation["eos_token_id"]
    w.add_eos_token_id(ends[0])
    w.add_pad_token_id(generation["pad_token_id"])
    w.add_add_bos_token(False)
    w.add_chat_template(config["chat_template"])


def value_heads(c: dict) -> np.ndarray:
    """GGUF value head -> HF value head: GGUF interleaves the key heads."""
    nk, nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    return np.arange(nv).reshape(nk, nv // nk).T.reshape(-1)


def by_head(x: np.ndarray, order: np.ndarray, width: int) -> np.ndarray:
    """Rows regrouped by head."""
    return x.reshape(len(order), width, *x.shape[1:])[order].reshape(x.shape)


def gdn_order(name: str, x: np.ndarray, c: dict) -> np.ndarray:
    """Value heads into GGUF order, for every tensor that has them."""
    order, vd = value_heads(c), c["linear_value_head_dim"]
    keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    if name in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate([x[:keys], by_head(x[keys:], order, vd)])
    if name == "attn_gate":
        return by_head(x, order, vd)
    if name in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return by_head(x, order, 1)
    if name == "ssm_out":
        return np.ascontiguousarray(by_head(np.ascontiguousarray(x.T), order, vd).T)
    return x


def layer_tensors(w: Writer, ck: Checkpoint, c: dict, layer: int) -> None:
    """Everything of one block."""
    hf, out = f"{PREFIX}layers.{layer}.", f"blk.{layer}."
    for name in ck.tensors:
        if not name.startswith(hf) or "ple_embedding" in name:
            continue
        leaf = name[len(hf) :]
        x = ck.float32(name)
        stem = leaf.removesuffix(".weight")
        if stem in PLAIN:
            target = PLAIN[stem]
            w.matrix(f"{out}{target}.weight", gdn_order(target, x, c))
        elif stem in PLUS_ONE:
            w.vector(f"{out}{PLUS_ONE[stem]}.weight", x + 1)
        elif "hyper_connection." in leaf:
            half, _, rest = leaf.partition("_hyper_connection.")
            target = f"{out}hc_{'attn' if half == 'attn' else 'ffn'}_{HYPER[rest]}.weight"
            w.vector(target, x + 1) if rest == "hc_norm.weight" else w.matrix(target, x)
        elif stem == "self_attn.indexer.index_qk_proj":
            cut = c["indexer_n_heads"] * c["indexer_head_dim"]
            w.matrix(f"{out}indexer.q_proj.weight", x[:cut])
            w.matrix(f"{out}indexer.k_proj.weight", x[cut:])
        elif stem == "mlp.experts.gate_up_proj":
            half = x.shape[1] // 2
            w.matrix(f"{out}ffn_gate_exps.weight", x[:, :half])
            w.matrix(f"{out}ffn_up_exps.weight", x[:, half:])
        elif stem == "mlp.experts.down_proj":
            w.matrix(f"{out}ffn_down_exps.weight", x)
        elif stem in ("linear_attn.conv1d", "ple.conv1d"):
            target = "ssm_conv1d" if stem.startswith("linear") else "ple_conv1d"
            w.vector(f"{out}{target}.weight", gdn_order(target, x[:, 0], c))
        elif stem == "linear_attn.A_log":
            w.vector(f"{out}ssm_a", gdn_order("ssm_a", -np.exp(x), c))
        elif stem == "linear_attn.dt_bias":
            w.vector(f"{out}ssm_dt.bias", gdn_order("ssm_dt", x, c))
        elif stem == "linear_attn.norm":
            w.vector(f"{out}ssm_norm.weight", x)
        else:
            raise SystemExit(f"no GGUF name for {name}")


def model_tensors(w: Writer, ck: Checkpoint, c: dict) -> None:
    """Embedding, head, head read and the n-gram table."""
    w.matrix("token_embd.weight", ck.float32(f"{PREFIX}embed_tokens.weight"))
    w.matrix("output.weight", ck.float32("lm_head.weight"))
    for leaf, name in list(HYPER.items())[:3]:
        x = ck.float32(f"{PREFIX}hyper_connection_mixer.{leaf}")
        target = f"output_hc_{name}.weight"
        w.vector(target, x + 1) if name == "norm" else w.matrix(target, x)
    layer = c["ple_layer_ids"][0] - 1
    base = f"{PREFIX}layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
    parts = [ck.float32(f"{base}{i}.weight") for i in range(c["split_ngram_parts"])]
    w.matrix("per_layer_token_embd.weight", np.concatenate(parts))


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with open_checkpoint(args.folder) as ck:
        c = ck.config["text_config"]
        w = Writer(args.out)
        w.file.add_name("tiny-flash-next")
        metadata(w.file, c, ck)
        tokenizer(w.file, args.folder, ck.generation_config)
        model_tensors(w, ck, c)
        for layer in range(c["num_hidden_layers"]):
            layer_tensors(w, ck, c, layer)
        w.file.write_header_to_file()
        w.file.write_kv_data_to_file()
        w.file.write_tensors_to_file()
        w.file.close()
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
