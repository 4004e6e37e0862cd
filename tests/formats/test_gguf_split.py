"""Split GGUF sets (C01, C02, C04): opened from any part or the folder, refused when unfit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.formats.gguf_writer import Key, Tensor, f32_tensor, gguf_bytes

from strata.core.errors import FormatError, InputError
from strata.formats.checkpoint import Checkpoint, open_checkpoint
from strata.formats.string_array import StringArray

MODEL_KEYS: list[Key] = [
    ("general.architecture", "str", "tiny"),
    ("tokenizer.ggml.tokens", "array", ("str", ["a", "b"])),
]


def write_set(
    folder: Path,
    tensors: list[list[Tensor]],
    *,
    stem: str = "model",
    model_part: int = 0,
    keys: list[Key] = MODEL_KEYS,
    total: int | None = None,
) -> list[Path]:
    """A split set with one list of tensors a part, as llama.cpp's splitter lays it out."""
    count = len(tensors)
    paths = []
    for i, part in enumerate(tensors):
        split: list[Key] = [
            ("split.no", "u16", i),
            ("split.count", "u16", count),
            ("split.tensors.count", "i32", total or sum(len(p) for p in tensors)),
        ]
        path = folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(gguf_bytes((keys if i == model_part else []) + split, part))
        paths.append(path)
    return paths


def three_parts() -> list[list[Tensor]]:
    """Tensors out of alphabetical order, so that a sorted list would show."""
    return [
        [f32_tensor("token_embd", 4, 8), f32_tensor("blk.0.w", 8, start=100)],
        [f32_tensor("blk.1.w", 8, start=200)],
        [f32_tensor("output", 4, 8, start=300), f32_tensor("a_norm", 8, start=400)],
    ]


def contents(checkpoint: Checkpoint) -> list[tuple[str, list[float]]]:
    """Names in order, with their numbers."""
    return [(name, checkpoint.float32(name).ravel().tolist()) for name in checkpoint.tensors]


def refused(path: Path) -> str:
    """The message of the FormatError for ``path``."""
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model_part", [0, 2])
def test_any_part_or_the_folder_opens_the_whole(tmp_path: Path, model_part: int) -> None:
    # C02: same ordered tensors, same metadata, same numbers; expectation: what was written
    paths = write_set(tmp_path, three_parts(), model_part=model_part)
    expected = [
        (t.name, np.frombuffer(t.data, np.float32).tolist()) for part in three_parts() for t in part
    ]
    for start in [*paths, tmp_path]:
        with open_checkpoint(start) as checkpoint:
            assert contents(checkpoint) == expected
            assert list(checkpoint.paths) == paths
            assert checkpoint.metadata["general.architecture"] == "tiny"
            tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
            assert isinstance(tokens, StringArray) and tokens.tolist() == ["a", "b"]
            assert checkpoint.metadata["split.no"] == model_part


@pytest.mark.parametrize("tensors", [
    [[], [f32_tensor("w", 8)]],
    [[f32_tensor("per_layer_token_embd.weight", 64, 8)], [f32_tensor("w", 8)]],
], ids=["metadata-only first part", "table in the first part"])  # fmt: skip
def test_layouts_of_published_sets(tmp_path: Path, tensors: list[list[Tensor]]) -> None:
    # expectation: the layouts named in the format survey of published files
    paths = write_set(tmp_path, tensors)
    with open_checkpoint(paths[-1]) as checkpoint:
        assert list(checkpoint.tensors) == [t.name for part in tensors for t in part]
        assert checkpoint.float32("w").tolist() == list(range(8))


def test_missing_parts_are_all_listed(tmp_path: Path) -> None:
    # C01 (b)
    paths = write_set(tmp_path, three_parts())
    paths[0].unlink()
    paths[2].unlink()
    for start in (paths[1], tmp_path):
        message = refused(start)
        assert "2 of the 3" in message
        assert paths[0].name in message and paths[2].name in message
        assert paths[1].name not in message


def test_cut_second_part(tmp_path: Path) -> None:
    # C01 (a): 64 of the table's bytes are gone; named even when the set is opened from part 1
    paths = write_set(tmp_path, [[f32_tensor("a", 8)], [f32_tensor("b", 8), f32_tensor("c", 32)]])
    paths[1].write_bytes(paths[1].read_bytes()[:-64])
    message = refused(paths[0])
    assert str(paths[1]) in message and "'c'" in message and "64 bytes are missing" in message


def test_two_sets_in_a_folder_are_both_named(tmp_path: Path) -> None:
    # C02: refused, both named; a vision tower beside a set is no second checkpoint
    write_set(tmp_path, three_parts(), stem="first")
    (tmp_path / "mmproj-F16.gguf").write_bytes(gguf_bytes())
    open_checkpoint(tmp_path).close()
    write_set(tmp_path, three_parts(), stem="second")
    message = refused(tmp_path)
    assert "first-*-of-00003.gguf" in message and "second-*-of-00003.gguf" in message


def test_same_stem_with_other_count_is_another_set(tmp_path: Path) -> None:
    # expectation: -of-00003 and -of-00001 files of one name come from two publications
    write_set(tmp_path, three_parts())
    write_set(tmp_path, [[f32_tensor("w", 8)]])
    message = refused(tmp_path)
    assert "of-00003" in message and "of-00001" in message


def test_tensor_in_two_parts_names_both_files(tmp_path: Path) -> None:
    # C04
    paths = write_set(tmp_path, [[f32_tensor("w.1", 8)], [f32_tensor("w.1", 8)]])
    message = refused(paths[0])
    assert "'w.1'" in message and str(paths[0]) in message and str(paths[1]) in message


def test_part_of_another_set(tmp_path: Path) -> None:
    # expectation: each way a foreign part can betray itself by its split keys or its tensors
    paths = write_set(tmp_path / mkdir(tmp_path, "a"), three_parts())
    other = write_set(tmp_path / mkdir(tmp_path, "b"), [*three_parts(), []])
    fewer = write_set(tmp_path / mkdir(tmp_path, "c"), [[], [f32_tensor("x", 4)], []])
    original = paths[1].read_bytes()

    shutil.copy(other[1], paths[1])
    assert "part 2 of 4" in refused(paths[0])
    shutil.copy(fewer[1], paths[1])
    assert "set of 1 tensors" in refused(paths[0])
    shutil.copy(paths[2], paths[1])
    assert "says it is part 3 of 3" in refused(paths[0])
    paths[1].write_bytes(gguf_bytes([], [f32_tensor("blk.1.w", 8)]))
    assert "no split.count" in refused(paths[0])
    keys: list[Key] = [("split.no", "u16", 1), ("split.count", "u16", 3)]
    paths[1].write_bytes(gguf_bytes(keys, [f32_tensor("x", 4), f32_tensor("y", 4)]))
    assert "should hold 5 tensors but hold 6" in refused(paths[0])
    keys.append(("general.architecture", "str", "huge"))
    paths[1].write_bytes(gguf_bytes(keys, [f32_tensor("blk.1.w", 8)]))
    message = refused(paths[0])
    assert "'tiny'" in message and "'huge'" in message
    paths[1].write_bytes(original)
    open_checkpoint(paths[0]).close()


def mkdir(folder: Path, name: str) -> str:
    """Make a folder and give its name."""
    (folder / name).mkdir()
    return name


def test_renamed_part_is_not_taken_for_a_model(tmp_path: Path) -> None:
    # expectation: half a model must not load because its file was renamed
    paths = write_set(tmp_path, three_parts())
    renamed = paths[1].rename(tmp_path / "model.gguf")
    message = refused(renamed)
    assert "part 2 of 3" in message


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf"])
def test_impossible_part_names(tmp_path: Path, name: str) -> None:
    # expectation: parts are numbered 1 to n
    path = tmp_path / name
    path.write_bytes(gguf_bytes())
    assert "restore its name" in refused(path)


def test_split_keys_of_the_wrong_kind(tmp_path: Path) -> None:
    # expectation: a text where a number belongs is damage, not a crash
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([("split.count", "str", "two")]))
    assert "split.count must be an integer" in refused(path)


def test_single_file_may_carry_trivial_split_keys(tmp_path: Path) -> None:
    # expectation: llama.cpp writes split.count 1 or 0 into some unsplit files
    for count in (0, 1):
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf_bytes([("split.count", "u16", count)], [f32_tensor("w", 8)]))
        with open_checkpoint(path) as checkpoint:
            assert list(checkpoint.tensors) == ["w"]


def test_path_that_is_not_there(tmp_path: Path) -> None:
    # expectation: one clear line for a mistyped path
    with pytest.raises(InputError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing.gguf")
