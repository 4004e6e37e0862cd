"""Which family a checkpoint belongs to, and what is refused by name.

Expectations: the names that the published checkpoints and llama.cpp's converter use, and the rule
that a refusal names what the file calls itself and what is supported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import Checkpoint, open_checkpoint
from strata.models.registry import FAMILIES, find_family
from tests.formats.gguf_writer import F32, Tensor, gguf_bytes
from tests.formats.safetensors_writer import f32, safetensors_bytes

FIXTURES = Path(__file__).parent.parent / "fixtures"


def folder(path: Path, config: dict[str, object] | None) -> Checkpoint:
    """A safetensors folder with one tensor and this config.json."""
    (path / "model.safetensors").write_bytes(safetensors_bytes({"a": f32(2, 2)}))
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(path)


def gguf(path: Path, architecture: str) -> Checkpoint:
    """A GGUF with one tensor that says it is ``architecture``."""
    file = path / "model.gguf"
    keys = [("general.architecture", "str", architecture)]
    file.write_bytes(gguf_bytes(keys, [Tensor("a", (2, 2), F32, bytes(16))]))
    return open_checkpoint(file)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_found_by_every_name(family, tmp_path: Path) -> None:
    """By architecture, by model_type alone, and by GGUF architecture."""
    for i, name in enumerate(family.architectures):
        where = tmp_path / f"a{i}"
        where.mkdir()
        with folder(where, {"architectures": [name], "model_type": "whatever"}) as ckpt:
            assert find_family(ckpt) is family
    for i, name in enumerate(family.model_types):
        where = tmp_path / f"t{i}"
        where.mkdir()
        with folder(where, {"model_type": name}) as ckpt:
            assert find_family(ckpt) is family
    for name in family.gguf_names:
        with gguf(tmp_path, name) as ckpt:
            assert find_family(ckpt) is family


def test_names_are_unique() -> None:
    """No two families claim one name."""
    for kind in ("architectures", "model_types", "gguf_names"):
        names = [n for f in FAMILIES for n in getattr(f, kind)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.gguf")), ids=lambda p: p.parent.name)
def test_fixtures_belong_to_their_folder(path: Path) -> None:
    """Files of llama.cpp's converter, found by what it wrote into them."""
    with open_checkpoint(path) as ckpt:
        assert find_family(ckpt).name == path.parent.name


def test_unknown_is_named_with_what_is_supported(tmp_path: Path) -> None:
    """An unknown architecture: its name, a near one, and the list."""
    with (
        folder(tmp_path, {"architectures": ["Qwen3MoeForCausalLm"]}) as ckpt,
        pytest.raises(UnsupportedError) as caught,
    ):
        find_family(ckpt)
    text = str(caught.value)
    assert "'Qwen3MoeForCausalLm'" in text and "nearest is 'Qwen3MoeForCausalLM'" in text
    assert all(name in text for f in FAMILIES for name in f.architectures)
    with (
        gguf(tmp_path, "mamba2") as ckpt,
        pytest.raises(UnsupportedError, match="'mamba2'.*qwen4exp"),
    ):
        find_family(ckpt)


def test_vision_tower_is_called_one(tmp_path: Path) -> None:
    """A vision tower alone, by HF name; a CLIP GGUF is refused when it is opened."""
    config = {"architectures": ["SiglipVisionModel"], "model_type": "siglip_vision_model"}
    with folder(tmp_path, config) as ckpt, pytest.raises(UnsupportedError, match="vision tower"):
        find_family(ckpt)
    with pytest.raises(UnsupportedError, match="vision tower"):
        gguf(tmp_path, "clip")


@pytest.mark.parametrize("config", [None, {"hidden_size": 8}])
def test_nothing_says_what_it_is(config: dict[str, object] | None, tmp_path: Path) -> None:
    """No config.json, or one without names."""
    with folder(tmp_path, config) as ckpt, pytest.raises(FormatError, match=r"config\.json"):
        find_family(ckpt)
