"""Routed experts in every layout, and claims about their storage.

Expectations: the same weights in another layout must give the same logits; single experts against
plain slicing of the stored tensors in torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.core.errors import FormatError, InputError, UnsupportedError
from strata.formats.checkpoint import Checkpoint, open_checkpoint
from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.models.expert_source import PROJS, ExpertSource, Proj
from strata.models.registry import find_family
from tests.models.edited import Tensors, edit_folder, edit_gguf
from tests.models.plain_forward import forward
from tests.oracle import Options, cached

FIXTURES = Path(__file__).parent.parent / "fixtures"


def source_of(ckpt: Checkpoint) -> ExpertSource:
    """The checked expert source of an open checkpoint."""
    family = find_family(ckpt)
    experts = family.expert_source(ckpt, family.spec(ckpt))
    experts.check()
    return experts


def matrix(experts: ExpertSource, layer: int, expert: int, proj: Proj) -> np.ndarray:
    """One expert's matrix in f32."""
    kind = experts.types(layer)[PROJS.index(proj)]
    return dequantize(TYPES[kind], np.ascontiguousarray(experts.rows(layer, expert, proj)))


def _stack(tensors: Tensors, fuse: bool) -> Tensors:
    """Per-expert tensors as one 3-D tensor per projection, or gate and up in one."""
    kept = {name: t for name, t in tensors.items() if ".mlp.experts." not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        stacks = {
            p: torch.stack([tensors[f"{prefix}{e}.{p}_proj.weight"] for e in range(8)])
            for p in PROJS
        }
        if fuse:
            kept[prefix + "gate_up_proj"] = torch.cat([stacks["gate"], stacks["up"]], 1)
            kept[prefix + "down_proj"] = stacks["down"]
        else:
            kept |= {f"{prefix}{p}_proj.weight": stack for p, stack in stacks.items()}
    return kept


def test_three_layouts_are_one_model(tmp_path: Path) -> None:
    """C06: per expert, stacked, fused: same bytes, same logits, all tensors accounted for."""
    apart, reference = cached("qwen3_moe")
    stacked = edit_folder(apart, tmp_path / "3d", lambda t: _stack(t, fuse=False))
    fused = edit_folder(apart, tmp_path / "fused", lambda t: _stack(t, fuse=True))
    ids = reference.input_ids[:40].tolist()
    expected = forward(apart, ids)
    for folder, per_layer in ((apart, 24), (stacked, 3), (fused, 2)):
        assert np.array_equal(forward(folder, ids), expected)
        with open_checkpoint(folder) as ckpt, open_checkpoint(apart) as original:
            experts, first = source_of(ckpt), source_of(original)
            named = set(experts.tensor_names())
            assert named == {n for n in ckpt.tensors if ".mlp.experts." in n}
            assert len(named) == 3 * per_layer
            for proj in PROJS:
                rows = experts.rows(2, 5, proj)
                assert not rows.flags.owndata, "rows of a plain layout are views of the file"
                assert np.array_equal(rows, first.rows(2, 5, proj))


def test_rows_that_a_layout_must_turn_around() -> None:
    """gpt-oss as released: input axis first, gate and up columns by turns, biases the same way."""
    folder, _ = cached("gpt_oss")
    from safetensors.torch import load_file

    stored = load_file(str(folder / "model.safetensors"))
    with open_checkpoint(folder) as ckpt:
        experts = source_of(ckpt)
        prefix = "model.layers.1.mlp.experts."
        gate_up, down = (stored[prefix + n].float() for n in ("gate_up_proj", "down_proj"))
        bias = stored[prefix + "gate_up_proj_bias"].float()
        for expert in (0, 7):
            gate, up, last = (matrix(experts, 1, expert, p) for p in PROJS)
            assert np.array_equal(gate, gate_up[expert, :, 0::2].t().numpy())
            assert np.array_equal(up, gate_up[expert, :, 1::2].t().numpy())
            assert np.array_equal(last, down[expert].t().numpy())
            assert np.array_equal(experts.bias(1, expert, "gate"), bias[expert, 0::2].numpy())
            assert np.array_equal(experts.bias(1, expert, "up"), bias[expert, 1::2].numpy())
            stored_down = stored[prefix + "down_proj_bias"].float()
            assert np.array_equal(experts.bias(1, expert, "down"), stored_down[expert].numpy())


def test_mxfp4_recoding_equals_llama_cpp_s() -> None:
    """Our recoding of *_blocks and *_scales, byte for byte against llama.cpp's converter."""
    folder, _ = cached("gpt_oss", Options(storage="mxfp4"))
    with (
        open_checkpoint(folder) as ours,
        open_checkpoint(FIXTURES / "gpt_oss/mxfp4.gguf") as theirs,
    ):
        mine, other = source_of(ours), source_of(theirs)
        for layer in mine.layers:
            assert mine.types(layer) == other.types(layer) == ("MXFP4",) * 3
            for expert in range(mine.n_experts):
                for proj in PROJS:
                    a, b = mine.rows(layer, expert, proj), other.rows(layer, expert, proj)
                    assert np.array_equal(a, b)


def test_nvfp4_scale_tensors(tmp_path: Path) -> None:
    """NVFP4 stacks carry one scale per expert in a tensor of their own; other types none."""
    from tests.formats.gguf_writer import F32, Tensor

    rng = np.random.default_rng(0)
    source = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with open_checkpoint(source) as ckpt:
        info = ckpt.info("blk.0.ffn_gate_exps.weight")
        assert source_of(ckpt).scale(0, 3, "gate") == 1.0
    n_bytes = info.n_rows * 36 * info.n_cols // 64
    if info.n_cols % 64:
        # pico rows are 32 wide: a file of its own with rows of one NVFP4 block
        n_bytes = info.n_rows * 36
    scales = rng.random(8).astype(np.float32)
    extra = (
        Tensor("blk.0.ffn_gate_exps.weight", (64, 32, 8), 40, rng.bytes(n_bytes)),
        Tensor("blk.0.ffn_gate_exps.scale", (8,), F32, scales.tobytes()),
        Tensor("blk.0.ffn_gate_exps.input_scale", (1,), F32, bytes(4)),
    )
    drop = {"blk.0.ffn_gate_exps.weight"}
    path = edit_gguf(
        source, tmp_path / "a.gguf", rename=lambda n: None if n in drop else n, extra=extra
    )
    with open_checkpoint(path) as ckpt:
        family = find_family(ckpt)
        experts = family.expert_source(ckpt, family.spec(ckpt))
        assert [experts.scale(0, e, "gate") for e in range(8)] == scales.tolist()
        assert experts.scale(0, 1, "up") == 1.0
        assert "blk.0.ffn_gate_exps.scale" in experts.tensor_names()
        assert experts.types(0)[0] == "NVFP4"
        with pytest.raises(FormatError, match=r"\[8, 32, 64\].*\[8, 32, 32\]"):
            experts.check()


@pytest.mark.parametrize(
    "claim, family",
    [
        ({"quant_method": "awq", "bits": 4}, "qwen3_moe"),
        ({"quant_method": "gptq", "bits": 4}, "qwen3_moe"),
        ({"quant_method": "mxfp4"}, "gpt_oss"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "deepseek_v3"),
    ],
)
def test_claimed_storage_that_the_tensors_deny(
    claim: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """C06: a config that claims packed weights over bfloat16 tensors is refused, not cast."""
    folder = edit_folder(
        cached(family)[0], tmp_path, config=lambda c: c | {"quantization_config": claim}
    )
    with pytest.raises(InputError, match=r"(?i)awq|gptq|mxfp4|fp8"):
        open_checkpoint(folder)


def test_experts_of_mixed_types_are_refused(tmp_path: Path) -> None:
    """One expert in another type than its layer: named, with both types."""
    name = "model.layers.1.mlp.experts.6.gate_proj.weight"

    def change(tensors: Tensors) -> Tensors:
        return tensors | {name: tensors[name].to(torch.float16)}

    folder = edit_folder(cached("qwen3_moe")[0], tmp_path, change)
    with (
        open_checkpoint(folder) as ckpt,
        pytest.raises(UnsupportedError, match=rf"{name} is F16.*BF16"),
    ):
        source_of(ckpt)


def test_dense_models_have_no_experts() -> None:
    """No layers, no tensors."""
    with open_checkpoint(FIXTURES / "llama" / "bf16.gguf") as ckpt:
        experts = source_of(ckpt)
        assert (experts.layers, experts.n_experts, experts.tensor_names()) == ((), 0, ())
