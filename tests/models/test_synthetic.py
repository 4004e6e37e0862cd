"""Synthetic models have the published sizes, and run.

Expected bytes: the expert bytes of the published Flash-Next IQ3_S file, and those of the models
that llama.cpp was measured with (bench/results), both from their files.
"""

from __future__ import annotations

import numpy as np
import pytest

import strata
from strata.core.errors import InputError, SettingError
from strata.engine.checkpoint_plan import CheckpointPlan, understand
from strata.models.spec import MoeSpec
from strata.models.synthetic import open_model

SMALL = "synthetic:qwen4_exp-125b:IQ3_S:layers=4:experts=18:vocab=64"


def plan(name: str) -> CheckpointPlan:
    return understand(open_model("synthetic:" + name))


def expert_bytes(name: str) -> tuple[int, int]:
    """(of all experts, of those that a token takes)"""
    of, total, active = plan(name), 0, 0
    for entry, layer in zip(of.shapes, of.spec.layers, strict=True):
        if entry is not None and isinstance(layer.ffn, MoeSpec):
            total += entry[0].weight_bytes * entry[1]
            active += entry[0].weight_bytes * layer.ffn.n_active
    return total, active


def test_expert_bytes_are_those_of_the_published_files() -> None:
    assert expert_bytes("qwen4_exp-125b:IQ3_S") == (50_292_326_400, 982_272_000)
    assert expert_bytes("qwen3-30b-a3b:Q4_K_M") == (17_553_162_240, 1_097_072_640)
    # by hand: MXFP4 is 17 bytes for 32 weights; Q4_K 144 and Q5_0 176 for 256
    assert expert_bytes("gpt-oss-120b:MXFP4")[0] == 36 * 128 * 3 * 2880 * 2880 * 17 // 32
    assert expert_bytes("glm-4.5-air:Q4_K")[0] == 45 * 128 * 1408 * 4096 * (2 * 144 + 176) // 256


def test_scaled_down_names_and_their_refusals() -> None:
    of = plan("qwen3-30b-a3b:Q4_K_M:layers=3:experts=9:vocab=64")
    assert of.n_experts_L == [9, 9, 9] and of.spec.n_vocab == 64
    with pytest.raises(InputError, match=r"did you mean 'qwen3-30b-a3b:Q4_K_M'\?"):
        open_model("synthetic:qwen3-30b-a3b:Q4_K")
    with pytest.raises(InputError, match=r"'layers=49' is no size; use layers=1\.\.48"):
        open_model("synthetic:qwen3-30b-a3b:Q4_K_M:layers=49")
    with pytest.raises(InputError, match=r"at least 2 layers and 8 experts"):
        open_model("synthetic:glm-4.5-air:Q4_K:layers=1")


def test_a_small_one_runs() -> None:
    """Logits are finite, of ordinary size and equal bit for bit through windows and as one prompt;
    there is no text, and the reason is given. Expert 17 repeats expert 1 (of 16 that differ) at
    another address, and is no expert 0, nor that of another layer."""
    with strata.load(SMALL, device="cpu", context=64) as model:
        tokens = list(range(3, 11))
        prompt = model.logits(tokens)
        assert np.isfinite(prompt).all() and 0.1 < prompt.std() < 10
        assert np.array_equal(model.logits(tokens, through="windows", window=4), prompt)
        assert any("text in and out: off" in line for line in model.report)
        with pytest.raises(InputError, match="no vocabulary"):
            model.generate("text")
        blob = model.engine.service.tier._store.blob
        assert blob(2, 17).data_ptr() != blob(2, 1).data_ptr()
        assert np.array_equal(blob(2, 17).numpy(), blob(2, 1).numpy())
        assert not np.array_equal(blob(2, 0).numpy(), blob(2, 1).numpy())
        assert not np.array_equal(blob(1, 0).numpy()[:4096], blob(2, 0).numpy()[:4096])


def test_nothing_to_pack() -> None:
    with pytest.raises(SettingError, match="--experts-on-disk: a synthetic model has no files"):
        strata.load(SMALL, device="cpu", experts_on_disk=True)
