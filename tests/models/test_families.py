"""Every family from both kinds of file against transformers.

Expectations: float32 logits of transformers on the same weights (tests/oracle). The GGUF files in
tests/fixtures were written by llama.cpp's converter, so their names and layouts are not of our
making.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata.formats.checkpoint import open_checkpoint
from strata.models.registry import find_family
from tests.models.plain_forward import forward
from tests.oracle import FAMILIES, Options, Reference, cached

FIXTURES = Path(__file__).parent.parent / "fixtures"


def rel(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, as a share of the largest value of b."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def gguf(family: str, stem: str = "bf16") -> tuple[Path, Reference]:
    """A committed GGUF and the numbers that belong to it."""
    path = FIXTURES / family / f"{stem}.gguf"
    return path, Reference.load(path.with_suffix(".npz"))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_transformers(family: str) -> None:
    """A converter's GGUF, against transformers' logits of the checkpoint it came from."""
    path, reference = gguf(family)
    ours = forward(path, reference.input_ids.tolist())
    n = reference.comparable()
    assert n > 60, "the fixture's routing is too close to call early on"
    assert rel(ours[:n], reference.logits[:n]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_equals_transformers_and_gguf(family: str) -> None:
    """HF names against transformers, and (same seed) against the GGUF copy."""
    folder, reference = cached(family)
    tokens = reference.input_ids.tolist()
    ours = forward(folder, tokens)
    n = reference.comparable()
    assert rel(ours[:n], reference.logits[:n]) < 1e-4
    path, stored = gguf(family)
    assert tokens == stored.input_ids.tolist(), "the fixture was made from another seed"
    assert rel(forward(path, tokens), ours) < 1e-6


@pytest.mark.parametrize(
    "family, config",
    [
        ("qwen4_exp", {"ple_layer_ids": [], "hc_count": 2, "tie_word_embeddings": True}),
        ("qwen4_exp", {"ple_layer_ids": [1], "ngram_size": 2, "output_gate_type": None}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
        ("qwen3_next", {"decoder_sparse_step": 2}),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2}),
        (
            "deepseek_v3",
            {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
        ),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    ],
)
def test_other_settings(family: str, config: dict[str, object]) -> None:
    """Settings off the beaten path, against transformers with the same config."""
    folder, reference = cached(family, Options(config=config, n_tokens=40))
    ours, n = forward(folder, reference.input_ids.tolist()), reference.comparable()
    assert n > 20
    assert rel(ours[:n], reference.logits[:n]) < 1e-4


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}


@pytest.mark.parametrize(
    "family, rope",
    [
        ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
        ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 20}),
        ("qwen3_moe", {**YARN, "original_max_position_embeddings": 64}),
        ("qwen3_moe", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}),
    ],
)
def test_rope_scaling(family: str, rope: dict[str, object]) -> None:
    """YaRN with its softmax scale, and linear scaling, against transformers."""
    rope.setdefault("original_max_position_embeddings", 32)
    if rope["rope_type"] == "linear":
        del rope["original_max_position_embeddings"]
    options = Options(config={"rope_parameters": rope}, n_tokens=60)
    folder, reference = cached(family, options)
    ours, n = forward(folder, reference.input_ids.tolist()), reference.comparable()
    assert n > 20
    assert rel(ours[:n], reference.logits[:n]) < 1e-4


def test_packed_mxfp4_from_both_files() -> None:
    """gpt-oss blocks and scales, and llama.cpp's repacking, against transformers' logits."""
    options = Options(storage="mxfp4")
    folder, reference = cached("gpt_oss", options)
    tokens = reference.input_ids.tolist()
    ours, n = forward(folder, tokens), reference.comparable()
    assert rel(ours[:n], reference.logits[:n]) < 1e-4
    path, _ = gguf("gpt_oss", "mxfp4")
    with open_checkpoint(path) as ckpt:
        assert ckpt.info("blk.0.ffn_gate_exps.weight").type.name == "MXFP4"
    assert rel(forward(path, tokens), ours) < 1e-6


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_block_fp8(family: str) -> None:
    """Block FP8 (weight and weight_scale_inv), against transformers on the values it stands for."""
    sizes = {"h": 128, "inter": 128, "e": 4, "k": 2}
    config = {"n_group": 1, "topk_group": 1} if family == "deepseek_v3" else {}
    options = Options(storage="fp8", sizes=sizes, config=config, n_tokens=40)
    folder, reference = cached(family, options)
    with open_checkpoint(folder) as ckpt:
        assert ckpt.dtype_counts()["F8_E4M3"] > 20
        spec = find_family(ckpt).spec(ckpt)
        experts = find_family(ckpt).expert_source(ckpt, spec)
        assert experts.types(experts.layers[0]) == ("F8_E4M3_B128",) * 3
    ours, n = forward(folder, reference.input_ids.tolist()), reference.comparable()
    assert n > 20
    assert rel(ours[:n], reference.logits[:n]) < 1e-4


def test_fused_gguf_equals_the_plain_one() -> None:
    """The converter's --fuse-gate-up-exps and --fuse-qkv, against its plain output."""
    path, reference = gguf("qwen3_5_moe")
    tokens = reference.input_ids.tolist()
    fused = path.with_name("fused.gguf")
    with open_checkpoint(fused) as ckpt:
        assert "blk.0.ffn_gate_up_exps.weight" in ckpt.tensors
        assert "blk.3.attn_qkv.weight" in ckpt.tensors
    assert np.array_equal(forward(fused, tokens), forward(path, tokens))


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_moe"])
def test_q8_0_gguf_stays_near(family: str) -> None:
    """The converter's Q8_0: 8-bit rounding moves logits a little, a wrong layout a lot."""
    path, reference = gguf(family)
    ours = forward(path.with_name("q8_0.gguf"), reference.input_ids.tolist())
    drift = np.abs(ours - reference.logits).mean() / reference.logits.std()
    assert 1e-4 < drift < 0.1
