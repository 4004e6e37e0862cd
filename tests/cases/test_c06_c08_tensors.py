"""C06 to C08 through the public doors: layouts of experts, weights nobody filled, mixed formats.

Expectations: ``tiny.forward`` (float64, written apart from the program) and what was done to the
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.core.errors import UnsupportedError
from tests.cases.kit import load, refused
from tests.cases.tiny import (
    Sizes,
    Weights,
    config,
    draw,
    forward,
    gguf_keys,
    stacked,
    write_folder,
    write_gguf,
)
from tests.models.edited import edit_folder
from tests.oracle import cached

SIZES = Sizes()
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 250, 40)]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return draw(SIZES)


@pytest.fixture(scope="module")
def expected(weights: Weights) -> np.ndarray:
    logits, margin = forward(weights, SIZES, IDS)
    assert margin.min() > 1e-4, "a router choice that rounding could turn"
    return logits


def assert_near(logits: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(logits - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("layout", ["one by one", "stacked", "fused"])
@pytest.mark.parametrize("format_", ["safetensors", "gguf"])
def test_c06_layouts_of_experts(
    layout: str, format_: str, weights: Weights, expected: np.ndarray, tmp_path: Path
) -> None:
    """Logits agree to 1e-6 with the same bytes in RAM; all expert tensors are accounted for."""
    per_layer = {"one by one": 3 * SIZES.experts, "stacked": 3, "fused": 2}[layout]
    tensors = weights
    if layout != "one by one":
        tensors = stacked(weights, SIZES, fused=layout == "fused")
    if format_ == "gguf":
        path = write_gguf(tmp_path / "a.gguf", tensors, gguf_keys(SIZES))
    else:
        path = write_folder(tmp_path / "a", tensors, config(SIZES))
    with load(path) as model:
        assert_near(model.logits(IDS), expected, 1e-6)
        assert f"{per_layer * SIZES.layers} tensors of experts" in model.report
        n = SIZES.layers * SIZES.experts
        assert any(line.startswith(f"experts: {n} in RAM") for line in model.report)
        planned = {line.owner: line.n_bytes for line in model.engine.plan.entries}
        assert planned["routed experts"] >= n * 3 * SIZES.d * SIZES.ff * 4


@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_c06_experts_transposed_or_short_are_refused(
    layout: str, weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another axis order, an expert too few: both shapes are named, nothing is reshaped."""
    sizes = Sizes(ff=64)
    tensors = stacked(draw(sizes), sizes, fused=layout == "fused")
    name = "model.layers.1.mlp.experts.down_proj" + (".weight" if layout == "stacked" else "")
    turned = tensors | {name: tensors[name].transpose(1, 2).contiguous()}
    refused(write_folder(tmp_path / "a", turned, config(sizes)), capsys, "down_proj", "[8, 32, 64]")
    short = tensors | {name: tensors[name][:-1].contiguous()}
    refused(write_folder(tmp_path / "b", short, config(sizes)), capsys, "down_proj", "[7, 32, 64]")


def test_c06_one_expert_missing_in_one_layer(
    weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors = {n: t for n, t in weights.items() if n != name}
    refused(write_folder(tmp_path / "a", tensors, config(SIZES)), capsys, name)
    settings = config(SIZES, num_experts=7)
    refused(write_folder(tmp_path / "b", weights, settings), capsys, "experts.7.")


@pytest.mark.parametrize(
    "claim",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "never-heard-of"},
        {"bits": 4},
        "4bit",
    ],
)
@pytest.mark.parametrize("holder", ["config", "text_config"])
def test_c06_a_claim_that_the_tensors_deny(
    claim: Any,
    holder: str,
    weights: Weights,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Packed weights are claimed, bfloat16 is there: refused, not cast."""
    plain = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    settings = config(SIZES)
    if holder == "config":
        settings["quantization_config"] = claim
    else:
        settings = {
            "architectures": settings["architectures"],
            "text_config": settings | {"quantization_config": claim},
        }
    refused(write_folder(tmp_path / "a", plain, settings), capsys, "quant")


def test_c06_packed_tensors_that_nobody_claims(
    weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other way round: FP8 without scales, integers in place of numbers."""
    name = "model.layers.0.self_attn.q_proj.weight"
    lone = weights | {name: weights[name].to(torch.float8_e4m3fn)}
    refused(write_folder(tmp_path / "a", lone, config(SIZES)), capsys, name, "FP8")
    scaled = lone | {name + "_scale": torch.ones(1)}
    refused(write_folder(tmp_path / "b", scaled, config(SIZES)), capsys, name)
    whole = weights | {name: weights[name].to(torch.int8)}
    refused(write_folder(tmp_path / "c", whole, config(SIZES)), capsys, name, "I8")


@pytest.mark.parametrize(
    "old, new",
    [
        ("model.embed_tokens.weight", "model.wte.weight"),
        ("model.norm.weight", "model.final.weight"),
        ("lm_head.weight", "model.head.weight"),
        ("model.layers.1.self_attn.k_norm.weight", "model.layers.1.self_attn.key_norm.weight"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.router.weight"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.3.w3.weight"),
    ],
)
def test_c07_a_weight_under_another_name(
    old: str, new: str, weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both lists, and no word of damage."""
    tensors = {new if n == old else n: t for n, t in weights.items()}
    line = refused(
        write_folder(tmp_path / "a", tensors, config(SIZES)),
        capsys,
        "1 weight nobody filled",
        f"(from {old})",
        f"1 file tensor nobody used: {new}",
    )
    assert "damage" not in line and "corrupt" not in line and "download" not in line


def test_c07_settings_of_a_smaller_or_larger_model(
    weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer more or less than the settings say; another width, another vocabulary."""
    folder = write_folder(tmp_path / "a", weights, config(SIZES))
    write_folder(folder, weights, config(SIZES, num_hidden_layers=1))
    refused(folder, capsys, "nobody used", "model.layers.1.input_layernorm.weight")
    write_folder(folder, weights, config(SIZES, num_hidden_layers=3))
    refused(folder, capsys, "nobody filled", "model.layers.2.input_layernorm.weight")
    write_folder(folder, weights, config(SIZES, hidden_size=64))
    refused(folder, capsys, "64")
    write_folder(folder, weights, config(SIZES, vocab_size=300))
    refused(folder, capsys, "model.embed_tokens.weight", "300")


def test_c07_a_trunk_layer_is_no_draft_layer(tmp_path: Path) -> None:
    """GLM and DeepSeek number their draft layer past the trunk; a trunk layer that the settings
    forgot has no draft projections and is not left aside."""
    for family in ("glm4_moe", "deepseek_v3"):
        source, _ = cached(family)
        cut = edit_folder(source, tmp_path / family, config=lambda c: c | {"num_hidden_layers": 2})
        with pytest.raises(UnsupportedError, match=r"nobody used: model\.layers\.2\."):
            load(cut)


def test_c07_tied_head(
    weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing and tied: accepted, equal to a copy that stores it twice. Missing and not tied:
    refused. A GGUF without one is tied by the format's rule."""
    embed = weights["model.embed_tokens.weight"]
    tied = {n: t for n, t in weights.items() if n != "lm_head.weight"}
    twice = weights | {"lm_head.weight": embed.clone()}
    settings = config(SIZES, tie_word_embeddings=True)
    expected, _ = forward(twice, SIZES, IDS)
    paths = [
        write_folder(tmp_path / "tied", tied, settings),
        write_folder(tmp_path / "twice", twice, config(SIZES)),
        write_folder(tmp_path / "both", twice, settings),
        write_gguf(tmp_path / "tied.gguf", stacked(tied, SIZES, fused=False), gguf_keys(SIZES)),
    ]
    for path in paths:
        with load(path) as model:
            assert_near(model.logits(IDS), expected, 1e-6)
    refused(write_folder(tmp_path / "lost", tied, config(SIZES)), capsys, "head", "lm_head.weight")


def test_c08_three_formats_in_one_checkpoint(weights: Weights, tmp_path: Path) -> None:
    """BF16, F16 and F32 by turns, one BF16 weight of 100,000: against a float32 copy of the stored
    numbers; the report counts the tensors of each format."""
    formats = (torch.bfloat16, torch.float16, torch.float32)
    experts = [n for n in weights if ".experts." in n]
    mixed = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    others = [n for n in weights if n not in experts]
    for i, name in enumerate(others):
        mixed[name] = weights[name].to(formats[i % 3])
    big = "model.layers.1.self_attn.q_proj.weight"
    mixed[big] = weights[big].to(torch.bfloat16)
    mixed[big][3, 5] = 100_000.0
    plain = {n: t.to(torch.float32) for n, t in mixed.items()}
    assert plain[big][3, 5] > 65504
    expected, margin = forward(plain, SIZES, IDS)
    keys = gguf_keys(SIZES)
    paths = {
        "mixed": write_folder(tmp_path / "mixed", mixed, config(SIZES)),
        "plain": write_folder(tmp_path / "plain", plain, config(SIZES)),
        "gguf": write_gguf(tmp_path / "a.gguf", stacked(mixed, SIZES, fused=False), keys),
    }
    n = int(np.argmax(margin < 1e-5)) or len(IDS)
    assert n > 20
    found = {}
    for name, path in paths.items():
        with load(path) as model:
            found[name] = model.logits(IDS)[:n]
            assert np.isfinite(found[name]).all()
            if name == "mixed":
                (line,) = [x for x in model.report if x.startswith(f"{len(mixed)} tensors:")]
                for kind, dtype in zip(("BF16", "F16", "F32"), formats, strict=True):
                    assert f"{sum(t.dtype == dtype for t in mixed.values())} {kind}" in line
    for name, logits in found.items():
        assert_near(logits, expected[:n], 1e-5)
        assert np.array_equal(logits, found["plain"]), name


def test_c08_bfloat16_says_the_config_but_float16_is_there(
    weights: Weights, tmp_path: Path
) -> None:
    """config.json's dtype decides nothing: the tensors' own types do."""
    half = {n: t.to(torch.float16) for n, t in weights.items()}
    with load(write_folder(tmp_path / "a", half, config(SIZES, torch_dtype="bfloat16"))) as model:
        assert_near(model.logits(IDS), forward(half, SIZES, IDS)[0], 1e-6)
        assert f"{len(half)} tensors: {len(half)} F16" in model.report


def test_c08_every_number_format_as_an_expert(weights: Weights, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kept = {n: t.to(dtype) if ".experts." in n else t for n, t in weights.items()}
        path = tmp_path / "a.gguf"
        write_gguf(path, stacked(kept, SIZES, fused=False), gguf_keys(SIZES))
        with load(path) as model:
            reference = forward(kept, SIZES, IDS)[0]
            assert_near(model.logits(IDS), reference, 1e-6)
