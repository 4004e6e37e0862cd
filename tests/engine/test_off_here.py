"""Settings that have nothing to do are refused or named with the reason (C44); expectations are the
settings' help."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cases.tiny import Sizes, config, draw, write_folder

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


def test_stop_texts_need_a_text(tmp_path: Path) -> None:
    """A checkpoint without a tokenizer: told at start, refused in a request."""
    sizes = Sizes()
    path = write_folder(tmp_path / "ids", draw(sizes), config(sizes))
    with strata.load(path, device="cpu", workers=1, context=64, stop=["x"]) as model:
        (line,) = [text for text in model.report if text.startswith("stop = ")]
        assert "off here: answers are ids without text" in line
        with pytest.raises(SettingError, match="stop: this model writes ids"):
            model.generate([5, 6], stop=["x"])
        assert len(list(model.generate([5, 6], max_tokens=2))) == 2
