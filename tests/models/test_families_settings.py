"""Settings of config.json and GGUF metadata: what becomes of them, and what is refused.

Expectations: the two files of one checkpoint must give one spec; refused values are those whose
computation the program does not have; the n-gram numbers of the real model are those its published
GGUF files store.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.core.errors import FormatError, InputError, UnsupportedError
from strata.formats.checkpoint import open_checkpoint
from strata.models.config import Config
from strata.models.ngram import ngram_constants
from strata.models.registry import find_family
from strata.models.spec import AttentionSpec, GdnSpec, LayerSpec, ModelSpec, NgramSpec
from tests.models.edited import edit_folder, edit_gguf
from tests.oracle import FAMILIES, cached

FIXTURES = Path(__file__).parent.parent / "fixtures"


def spec_of(path: Path) -> ModelSpec:
    """The spec of a checkpoint."""
    with open_checkpoint(path) as ckpt:
        return find_family(ckpt).spec(ckpt)


def gguf(family: str) -> Path:
    """The converter's GGUF of a family."""
    return FIXTURES / family / "bf16.gguf"


def _neutral(layer: LayerSpec) -> LayerSpec:
    """Without what the two files lay out differently on purpose: head order, llama's pairing."""
    mixer = layer.mixer
    if isinstance(mixer, GdnSpec):
        mixer = replace(mixer, head_order="grouped")
    elif isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, rotary=replace(mixer.rotary, pairing="half", inv_freq=()))
    return replace(layer, mixer=mixer)


def _frequencies(layer: LayerSpec) -> tuple[float, ...]:
    mixer = layer.mixer
    return () if isinstance(mixer, GdnSpec) else mixer.rotary.inv_freq


@pytest.mark.parametrize("family", FAMILIES)
def test_both_files_give_one_spec(family: str) -> None:
    """config.json and what llama.cpp's converter made of it."""
    ours, theirs = spec_of(cached(family)[0]), spec_of(gguf(family))
    assert ours.family == theirs.family == family
    # a GGUF stores floats as f32
    assert theirs.norm_eps == pytest.approx(ours.norm_eps, rel=1e-6)
    assert len(ours.layers) == len(theirs.layers)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert _frequencies(a) == pytest.approx(_frequencies(b), rel=2e-6)
        if hasattr(a.ffn, "scale"):
            assert b.ffn.scale == pytest.approx(a.ffn.scale, rel=1e-6)
            b = replace(b, ffn=replace(b.ffn, scale=a.ffn.scale))
        assert _neutral(a) == _neutral(b)
    same = {"layers": (), "norm_eps": 0.0}
    assert replace(ours, **same) == replace(theirs, **same)


def test_flagship_layers() -> None:
    """Layers, head order, n-gram block of qwen4_exp, from the sizes of the checkpoint."""
    spec = spec_of(gguf("qwen4_exp"))
    assert [isinstance(x.mixer, GdnSpec) for x in spec.layers] == [True, True, True, False, True]
    assert [x.ngram is not None for x in spec.layers] == [False, True, False, False, False]
    gdn, attention = spec.layers[0].mixer, spec.layers[3].mixer
    assert isinstance(gdn, GdnSpec) and isinstance(attention, AttentionSpec)
    assert (gdn.head_order, gdn.output_gate) == ("interleaved", "sigmoid")
    assert attention.gate and attention.indexer is not None
    assert (attention.indexer.budget_tokens, attention.indexer.block_tokens) == (16, 4)
    assert (spec.streams, spec.hc_rank) == (4, 16)
    ngram = spec.layers[1].ngram
    assert isinstance(ngram, NgramSpec)
    assert (ngram.eos_token, ngram.dilation, ngram.head_dim) == (7, 3, 8)


def test_real_model_s_ngram_constants() -> None:
    """Multipliers and primes as published GGUF files of the flagship store them."""
    found = ngram_constants(
        n_vocab=248320,
        ngram_size=3,
        heads_per_ngram=8,
        vocab_base=20_000_000,
        divisible_by=128,
        seed=1234,
    )
    assert found.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert found.head_vocab[:3] == (20000003, 20000023, 20000033)
    assert found.head_vocab[-1] == 20000171
    assert found.n_table_rows == 320_001_536


HF_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True; only False"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias is True; only False"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; only"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'; only"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts per token cannot be chosen from 8"),
    ("qwen3_moe", {"num_key_value_heads": 3}, "4 query heads cannot share 3 key heads"),
    ("qwen3_moe", {"hidden_size": "32"}, "hidden_size is '32' where a whole number"),
    ("qwen3_moe", {"num_hidden_layers": None}, "has no num_hidden_layers"),
    ("qwen3_next", {"layer_types": ["mamba"] * 5}, "layer_types is 'mamba'; only"),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types has 1 items for 5 layers"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "layer_types is 'chunked_attention'"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; only 1.702"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
    ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "3 experts per token cannot"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True; only False"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2; only 1"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen4_exp", {"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; only 'silu' or 'sigm"),
    ("qwen4_exp", {"indexer_kv_heads": 2}, "indexer_kv_heads is 2; only 1"),
    ("qwen4_exp", {"indexer_n_heads": None}, "has no indexer_n_heads"),
    ("qwen4_exp", {"eos_token_id": None}, "eos_token_id"),
    ("qwen4_exp", {"ple_layer_ids": [1, 2]}, "ple_layer_ids is [1, 2]; only one n-gram layer"),
]


@pytest.mark.parametrize("family, change, expected", HF_REFUSALS)
def test_refused_configs(
    family: str, change: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Each names file, key and value, in one line."""

    def edit(config: dict[str, Any]) -> dict[str, Any]:
        if "text_config" in config:
            return config | {"text_config": config["text_config"] | change}
        return config | change

    folder = edit_folder(cached(family)[0], tmp_path, config=edit)
    with pytest.raises(InputError) as caught:
        spec_of(folder)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


GGUF_REFUSALS: list[tuple[str, str, tuple[str, Any] | None, str]] = [
    ("qwen3_moe", "qwen3moe.rope.scaling.type", ("str", "longrope"), "is 'longrope'; only none"),
    ("qwen3_moe", "qwen3moe.attention.value_length", ("u32", 8), "value_length is 8; only 16"),
    ("qwen3_moe", "qwen3moe.expert_count", None, "has no qwen3moe.expert_count"),
    ("qwen3_moe", "qwen3moe.block_count", ("str", "3"), "block_count is '3' where a whole"),
    ("glm4_moe", "glm4moe.expert_gating_func", ("u32", 1), "expert_gating_func is 1; only 2"),
    ("deepseek_v3", "deepseek2.expert_gating_func", ("u32", 1), "expert_group_count is 4; only 1"),
    ("deepseek_v3", "deepseek2.expert_gating_func", ("u32", 3), "is 3; only 1 or 2"),
    ("llama", "llama.expert_count", ("u32", 8), "llama.expert_count is 8; only 0"),
    ("qwen4_exp", "qwen4exp.ple.layers", ("array", ("i32", [1, 2])), "is [1, 2]; only one n-gram"),
    ("qwen4_exp", "qwen4exp.ple.head_offsets", None, "ple.head_offsets"),
    (
        "qwen4_exp",
        "qwen4exp.attention.recurrent_layers",
        ("array", ("bool", [True])),
        "has 1 items for 5 layers",
    ),
]


@pytest.mark.parametrize("family, key, change, expected", GGUF_REFUSALS)
def test_refused_metadata(
    family: str, key: str, change: tuple[str, Any] | None, expected: str, tmp_path: Path
) -> None:
    """The same for GGUF keys."""
    path = edit_gguf(gguf(family), tmp_path / "a.gguf", {key: change})
    with pytest.raises(InputError) as caught:
        spec_of(path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("ratios", [None, ("array", ("i32", [0] * 5))])
def test_lost_block_selection_is_refused(ratios: tuple[str, Any] | None, tmp_path: Path) -> None:
    """compress_ratios all 0 or missing although layer 3 selects: refused with a way out."""
    key = "qwen4exp.attention.compress_ratios"
    path = edit_gguf(gguf("qwen4_exp"), tmp_path / "a.gguf", {key: ratios})
    with pytest.raises(UnsupportedError) as caught:
        spec_of(path)
    text = str(caught.value)
    assert f"{key} is {'missing' if ratios is None else 'all 0'}" in text
    assert "layers [3]" in text and "full_attention" in text


def test_gpt_oss_pattern_of_windows(tmp_path: Path) -> None:
    """A GGUF says nothing (by turns), a period, or a flag per layer."""
    key = "gpt-oss.attention.sliding_window_pattern"
    cases: list[tuple[tuple[str, Any] | None, list[bool]]] = [
        (None, [True, False, True]),
        (("u32", 3), [True, True, False]),
        (("array", ("bool", [False, True, True])), [False, True, True]),
    ]
    for i, (value, expected) in enumerate(cases):
        path = edit_gguf(gguf("gpt_oss"), tmp_path / f"{i}.gguf", {key: value})
        windows = [layer.mixer.window_tokens for layer in spec_of(path).layers]
        assert [w == 24 for w in windows] == expected


def test_older_gguf_keys(tmp_path: Path) -> None:
    """DeepSeek files from before the MLA keys, and files without the optional ones."""
    whole = spec_of(gguf("deepseek_v3"))
    keys: dict[str, tuple[str, Any] | None] = {
        "deepseek2.attention.key_length_mla": None,
        "deepseek2.attention.value_length_mla": None,
        "deepseek2.attention.key_length": ("u32", 32),
        "deepseek2.attention.value_length": ("u32", 16),
    }
    path = edit_gguf(gguf("deepseek_v3"), tmp_path / "a.gguf", keys)
    assert spec_of(path) == whole
    qwen = spec_of(gguf("qwen3_next"))
    keys = {
        "qwen3next.attention.recurrent_layers": None,
        "qwen3next.expert_shared_feed_forward_length": None,
    }
    assert spec_of(edit_gguf(gguf("qwen3_next"), tmp_path / "b.gguf", keys)) == qwen


def test_end_tokens_come_from_every_file(tmp_path: Path) -> None:
    """generation_config.json first, then config.json; GGUF: end of text and end of turn."""
    folder = edit_folder(cached("qwen3_moe")[0], tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert spec_of(folder).eos_tokens == (9, 7)
    keys = {"tokenizer.ggml.eot_token_id": ("u32", 11)}
    path = edit_gguf(gguf("qwen3_moe"), tmp_path / "a.gguf", keys)
    assert spec_of(path).eos_tokens == (7, 11)


def test_config_reader_checks_kinds() -> None:
    """Wrong kinds are named, null counts as absent, spellings are tried in order."""
    config = Config({"a": None, "b": 4, "c": True, "d": [1, "x"], "e": 0.5}, "file")
    assert config.size("a", "b") == 4 and not config.has("a")
    assert config.number("b") == 4.0 and config.whole_numbers("b") == (4,)
    for read in (
        lambda: config.size("c"),
        lambda: config.size("e"),
        lambda: config.whole_numbers("d"),
        lambda: config.flag("b"),
        lambda: config.text("b"),
        lambda: config.section("b"),
        lambda: config.number("c"),
    ):
        with pytest.raises(FormatError, match="file"):
            read()
