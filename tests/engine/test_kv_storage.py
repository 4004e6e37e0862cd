"""Keys and values as codes of 8 and 4 bits, end to end.

Expectations: bits compared with the same engine reading the text as one prompt, or from its start;
on a device the CPU engine with the same codes, within the bound of test_device_engine; sizes by
hand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.engine.test_exactness import windows_with_rejections

import strata
from strata.core.errors import SettingError
from strata.core.settings_load import load_settings
from strata.engine.build import plan_model
from strata.engine.kv_class import MEASURED_KL
from strata.engine.model import Model

FIXTURES = Path(__file__).parent.parent / "fixtures"
FAMILIES = ["qwen4_exp", "gpt_oss", "qwen3_next", "llama"]
"""Block selection; sinks and sliding windows; recurrent layers between; nothing of these."""


def load(family: str, **settings: object) -> Model:
    return strata.load(FIXTURES / family / "bf16.gguf", device="cpu", context=128, **settings)


def tokens_of(family: str, n: int) -> list[int]:
    ids = np.load(FIXTURES / family / "bf16.npz")["input_ids"].reshape(-1)
    return [int(i) for i in ids[:n]]


def bytes_of(kv: str) -> int:
    """Planned bytes of state of llama's fixture."""
    asked = load_settings({"device": "cpu", "context": 128, "kv": kv})
    plan = plan_model(FIXTURES / "llama" / "bf16.gguf", asked).memory
    return sum(line.n_bytes for line in plan.entries if line.owner.startswith("state at"))


@pytest.mark.parametrize("kv", ["int8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_chunks_and_rejected_tokens_change_no_bit(family: str, kv: str) -> None:
    tokens = tokens_of(family, 45)
    with load(family) as model:
        plain = model.logits(tokens)
    with load(family, kv=kv) as model:
        whole = model.logits(tokens)
        assert np.array_equal(model.logits(tokens, through="windows", window=3), whole)
        assert np.array_equal(windows_with_rejections(model, tokens, 4), whole)
        line = next(x for x in model.report if x.startswith("keys and values: "))
        assert f"KL {MEASURED_KL[kv]:g}" in line
    with load(family, kv=kv, prompt_chunk=7, workers=2) as model:
        assert np.array_equal(model.logits(tokens), whole)
    assert not np.array_equal(plain, whole), "the setting must do something"


@pytest.mark.parametrize("kv", ["int8", "q4"])
def test_a_stored_conversation_goes_on_as_a_fresh_one(kv: str, tmp_path: Path) -> None:
    """Codes and scales go through parking, files and checkpoints like other state."""
    tokens = tokens_of("qwen4_exp", 40)
    settings = {"kv": kv, "park_dir": str(tmp_path), "prompt_chunk": 8, "temperature": 0.0}
    with load("qwen4_exp", **settings) as model:
        list(model.generate(tokens, max_tokens=3))
        list(model.generate(tokens[::-1], max_tokens=3))  # parks the first one
    with load("qwen4_exp", **settings) as model:
        answer = model.generate(tokens, max_tokens=8)
        ours = [event.token for event in answer]
        assert answer.report.reuse.reused_tokens >= 32
    with load("qwen4_exp", kv=kv, prompt_chunk=8, temperature=0.0) as model:
        assert [event.token for event in model.generate(tokens, max_tokens=8)] == ours


def test_planned_bytes_are_those_of_codes_and_scales() -> None:
    """Heads of 16 numbers: 64, 32, 16 + 2 and 8 + 2 bytes (one f16 scale for all 16)."""
    f32 = bytes_of("f32")
    assert [bytes_of(kv) * 64 // f32 for kv in ("f16", "int8", "q4")] == [32, 18, 10]
    with load("llama", kv="q4") as model:
        assert model.engine.state.n_bytes == bytes_of("q4")


def test_latent_attention_refuses_codes() -> None:
    with pytest.raises(SettingError, match="--kv int8: latent attention keeps one latent row"):
        load("deepseek_v3", kv="int8")
