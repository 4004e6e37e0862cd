"""Settings that have nothing to do are refused or named with the reason (C44); expectations are the
settings' help."""

from __future__ import annotations

from pathlib import Path

import pytest

import strata
from strata.core.errors import SettingError

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.mark.parametrize(
    "setting",
    [{"expert_layout": "native"}, {"experts_on_disk": True}, {"expert_cache": 1}, {"pack": "p"}],
)
def test_dense_models_have_no_experts_to_place(setting: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="has no routed experts to place"):
        strata.load(FIXTURES / "llama" / "bf16.gguf", device="cpu", **setting)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dtype": "float64", "cpu_isa": "portable"}, "cpu-isa = portable"),
        ({"logpos_top": 5}, "logpos-top = 5"),
        ({"top_k": 3}, "top-k = 3"),
    ],
)
def test_a_setting_without_effect_says_so(settings: dict[str, object], line: str) -> None:
    with strata.load(FIXTURES / "qwen2" / "bf16.gguf", device="cpu", **settings) as model:
        (found,) = [text for text in model.report if text.startswith(line)]
    assert "off here: " in found
