"""Safetensors checkpoints of several files (C01, C04): index files, part names, folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.formats.safetensors_writer import f32, safetensors_bytes, write_indexed

from strata.core.errors import FormatError, StrataError
from strata.formats.checkpoint import Checkpoint, open_checkpoint

PARTS = {
    "model-00001-of-00002.safetensors": {"z": f32(4), "a": f32(2, start=10)},
    "model-00002-of-00002.safetensors": {"m": f32(32, start=20)},
}
FIRST, SECOND = PARTS


def numbers(checkpoint: Checkpoint) -> list[tuple[str, float]]:
    """Names in order, with their first numbers."""
    return [(name, float(checkpoint.float32(name)[0])) for name in checkpoint.tensors]


def refused(path: Path) -> str:
    """The message of the FormatError for ``path``."""
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("with_index", [True, False])
def test_any_part_the_index_or_the_folder_opens_the_whole(tmp_path: Path, with_index: bool) -> None:
    # C02's kind: expectation is what was written, files in order and data order inside
    index = write_indexed(tmp_path, PARTS)
    starts = [tmp_path, tmp_path / FIRST, tmp_path / SECOND, index]
    if not with_index:
        index.unlink()
        starts.pop()
    for start in starts:
        with open_checkpoint(start) as checkpoint:
            assert numbers(checkpoint) == [("z", 0), ("a", 10), ("m", 20)]
            assert checkpoint.paths == (tmp_path / FIRST, tmp_path / SECOND)


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_files_are_listed(tmp_path: Path, with_index: bool) -> None:
    # C01 (b): every missing file by name
    parts = {f"model-{i:05d}-of-00004.safetensors": {f"t{i}": f32(4)} for i in (1, 2, 3, 4)}
    index = write_indexed(tmp_path, parts)
    if not with_index:
        index.unlink()
    names = list(parts)
    for name in names[1:3]:
        (tmp_path / name).unlink()
    message = refused(tmp_path)
    assert "2 of the 4" in message
    assert names[1] in message and names[2] in message and names[0] not in message


def test_index_without_any_file(tmp_path: Path) -> None:
    # C01 (b), the extreme: only the small files were downloaded
    write_indexed(tmp_path, PARTS)
    for name in PARTS:
        (tmp_path / name).unlink()
    message = refused(tmp_path)
    assert FIRST in message and SECOND in message


def test_cut_second_file(tmp_path: Path) -> None:
    # C01 (a)
    write_indexed(tmp_path, PARTS)
    path = tmp_path / SECOND
    path.write_bytes(path.read_bytes()[:-64])
    message = refused(tmp_path)
    assert str(path) in message and "'m'" in message and "64 bytes are missing" in message


def test_tensor_listed_but_not_in_its_file(tmp_path: Path) -> None:
    # expectation: an index that promises more than its files hold belongs to another version
    index = write_indexed(tmp_path, PARTS | {SECOND: {"m": f32(32), "n": f32(4)}})
    listing = json.loads(index.read_text())
    listing["weight_map"] |= {"ghost": FIRST, "m": FIRST, "z": FIRST}
    index.write_text(json.dumps(listing))
    message = refused(tmp_path)
    assert "'ghost'" in message and "'m'" in message and "'z'" not in message
    assert "lists 2 tensors" in message


def test_tensor_in_two_files_names_both(tmp_path: Path) -> None:
    # C04; l.1 and l.10 share a beginning only
    first, second = {"k": f32(4), "l.1": f32(4)}, {"l.1": f32(4), "l.10": f32(4)}
    write_indexed(tmp_path, {FIRST: first, SECOND: second})
    message = refused(tmp_path)
    assert "'l.1'" in message and FIRST in message and SECOND in message and "l.10" not in message


def test_name_twice_in_the_index(tmp_path: Path) -> None:
    # C04: JSON parsers keep the last silently
    index = write_indexed(tmp_path, PARTS)
    text = f'{{"weight_map": {{"z": "{FIRST}", "m": "{SECOND}", "z": "{SECOND}"}}}}'
    index.write_text(text)
    message = refused(tmp_path)
    assert "'z' occurs twice" in message and FIRST in message and SECOND in message


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a\\b", "", "..", "x" * 5000, 7, None]
)
def test_index_cannot_leave_its_folder(tmp_path: Path, name: object) -> None:
    # expectation: an index names files of its own folder
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    message = refused(tmp_path)
    assert "no file name" in message and len(message) < 1000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    # expectation: an index without a weight map is refused by its name
    index = write_indexed(tmp_path, PARTS)
    index.write_text(text)
    assert str(index) in refused(tmp_path)


def test_two_models_in_a_folder(tmp_path: Path) -> None:
    # expectation: no guessing which of two is meant, but each opens by its own name
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": f32(4)}))
    message = refused(tmp_path)
    assert "model.safetensors" in message and "consolidated.safetensors" in message
    open_checkpoint(tmp_path / "model.safetensors").close()


@settings(
    max_examples=100, deadline=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_index_never_escapes_as_another_error(tmp_path: Path, data: st.DataObject) -> None:
    # expectation: any bytes in the index give a readable set or one of our errors
    index = write_indexed(tmp_path, PARTS)
    content = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    index.write_bytes(content)
    try:
        with open_checkpoint(tmp_path) as checkpoint:
            assert numbers(checkpoint)
    except StrataError as error:
        assert "\n" not in str(error)
