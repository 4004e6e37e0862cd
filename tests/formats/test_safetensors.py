"""One safetensors file: honest ones by its package, hostile headers of our own (C01, C04)."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.formats.safetensors_writer import Entry, f32, header_for, packed, safetensors_bytes

from strata.core.errors import FormatError, StrataError, UnsupportedError
from strata.formats.checkpoint import open_checkpoint
from strata.formats.inspect import describe, render


def refused(path: Path, content: bytes) -> str:
    """The error message for a file with this content, the same for inspection and loading."""
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    with pytest.raises(FormatError) as inspected:
        open_checkpoint(path, for_inspection=True)
    message = str(caught.value)
    # equal: our own check found it, not the package that loading asks for a second opinion
    assert message == str(inspected.value)
    assert str(path) in message and "\n" not in message
    return message


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    # expectation: the arrays handed to the package's own writer
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.array([1.5, -2.0], np.float16),
        "i64": np.array([[2**62, -1]], np.int64),
        "u8": np.arange(5, dtype=np.uint8),
        "flag": np.array([True, False, True]),
        "scalar": np.array(7, np.int32),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            assert checkpoint.info(name).shape == array.shape
            assert checkpoint.raw(name).tobytes() == array.tobytes()
            read = checkpoint.array(name)
            assert read.dtype == array.dtype and read.shape == array.shape
            assert np.array_equal(read, array)


def test_tensors_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    # expectation: the order of the data section, so that reading in order reads the disk in order
    tensors = {"z": f32(4), "a": f32(2), "m": f32(3)}
    header = dict(sorted(header_for(tensors).items()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(header, b"".join(entry.data for entry in tensors.values())))
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["z", "a", "m"]
        assert checkpoint.float32("m").tolist() == [0, 1, 2]


HEADER = header_for({"a": f32(4), "b": f32(4)})


def changed(**entry: Any) -> bytes:
    """The two-tensor file with tensor b's header entry changed."""
    return packed(HEADER | {"b": HEADER["b"] | entry}, bytes(32))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x01", "too few"),
        (struct.pack("<Q", 2**52) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 1000) + b"{}", "998 of them are missing"),
        (packed("[1]"), "not a safetensors file"),
        (packed("{"), "not valid JSON"),
        (packed(b'{"\xff": 1}'), "not valid JSON"),
        (packed('{"a":' * 50_000), "not valid JSON"),
        (packed('{"a":' + "1" * 10_000 + "}"), "not valid JSON"),
        (packed({"a": 1}), "dtype, shape and data_offsets"),
        (packed({"a": {"dtype": "F32", "shape": [1]}}), "dtype, shape and data_offsets"),
        (packed({"__metadata__": {"a": 1}}), "__metadata__"),
        (packed({"__metadata__": [1]}), "__metadata__"),
        (changed(shape=[-4]), "impossible shape"),
        (changed(shape="4"), "impossible shape"),
        (changed(shape=[4.0]), "impossible shape"),
        (changed(shape=[True]), "impossible shape"),
        (changed(shape=[0, 2**63]), "impossible shape"),
        (changed(shape=[1] * 100), "impossible shape"),
        (changed(data_offsets=[32, 16]), "impossible data offsets"),
        (changed(data_offsets=[16]), "impossible data offsets"),
        (changed(data_offsets=[-16, 0]), "impossible data offsets"),
        (changed(data_offsets=None), "impossible data offsets"),
        (changed(shape=[5]), "contradicts itself"),
        (changed(dtype="F16"), "contradicts itself"),
        (changed(shape=[2**40]), "contradicts itself"),
        (changed(data_offsets=[2**63, 2**63 + 16]), "is cut short"),
        (changed(data_offsets=[0, 16]), "overlaps"),
        (changed(data_offsets=[8, 24]), "overlaps"),
        (packed(HEADER | {"b": HEADER["b"] | {"data_offsets": [24, 40]}}, bytes(40)), "a gap"),
        (packed(HEADER, bytes(40)), "8 bytes after its last tensor"),
        (packed({}, bytes(8)), "8 bytes after its last tensor"),
    ],
)  # fmt: skip
def test_headers_that_lie(tmp_path: Path, content: bytes, words: str) -> None:
    # expectation: the format's rules (header length, JSON object, sizes agree, data without holes)
    tracemalloc.start()
    started = time.perf_counter()
    try:
        message = refused(tmp_path / "model.safetensors", content)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in message
    assert time.perf_counter() - started < 2 and peak_bytes < 50e6


def test_cut_file_names_tensor_and_missing_bytes(tmp_path: Path) -> None:
    # C01 (a): 64 bytes cut off a file whose last two tensors have 32 bytes each
    content = safetensors_bytes({"a": f32(8), "b": f32(8), "c": f32(8)})
    message = refused(tmp_path / "model.safetensors", content[:-64])
    assert "64 bytes are missing" in message and "'b'" in message and "2 tensors" in message


def test_duplicate_name_in_the_header(tmp_path: Path) -> None:
    # C04: JSON parsers keep the last of two equal names silently; layer 10 is no duplicate of 1
    entries = header_for({"l.1": f32(4), "l.10": f32(4), "last": f32(4)})
    text = json.dumps(entries).replace('"last"', '"l.1"')
    message = refused(tmp_path / "model.safetensors", packed(text, bytes(48)))
    assert "'l.1'" in message and "[0, 16]" in message and "[32, 48]" in message
    assert "l.10" not in message


def test_second_opinion_of_the_package(tmp_path: Path) -> None:
    # expectation: half a surrogate pair passes Python's JSON reader; the package refuses it
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(json.dumps(header_for({"\ud800": f32(4)})), bytes(16)))
    with pytest.raises(FormatError, match="the safetensors package refuses it"):
        open_checkpoint(path)
    assert any("\\ud800" in line for line in render(describe(path)))


def test_dtypes_we_cannot_load(tmp_path: Path) -> None:
    # C05's kind: listed when inspected, refused with all their names when loaded
    tensors = {
        "fine": f32(2),
        "unsigned": Entry("U32", [2], bytes(8)),
        "scale": Entry("F8_E8M0", [4], bytes(4)),
        "alien": Entry("Q77", [3, 5], bytes(7)),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    lines = "\n".join(render(describe(path)))
    for words in ("U32 (unsupported)", "F8_E8M0 (unsupported)", "Q77 (unknown)", "fine"):
        assert words in lines
    with open_checkpoint(path, for_inspection=True) as checkpoint:
        assert checkpoint.raw("alien").size == 7
        with pytest.raises(UnsupportedError, match="Q77"):
            checkpoint.float32("alien")
        with pytest.raises(UnsupportedError, match="U32"):
            checkpoint.rows("unsigned")


def test_loading_lists_all_unsupported_dtypes(tmp_path: Path) -> None:
    # C05: every affected tensor is named, the others are not
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        safetensors_bytes(
            {
                "u.1": Entry("U32", [2], bytes(8)),
                "fine": f32(2),
                "u.2": Entry("U16", [2], bytes(4)),
            }
        )
    )
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "2 tensors" in message and "'u.1'" in message and "'u.2'" in message
    assert "'fine'" not in message


HONEST = safetensors_bytes(
    {"w": f32(2, 4), "b": Entry("BF16", [3], bytes(range(6))), "n": Entry("I64", [1], bytes(8))}
)


@settings(
    max_examples=300, deadline=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(HONEST) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    length=st.integers(0, len(HONEST)) | st.just(len(HONEST)),
)
def test_damage_never_escapes_as_another_error(
    tmp_path: Path, flips: list[tuple[int, int]], length: int
) -> None:
    # expectation: damaged bytes give either a readable file or one of our errors, in bounded time
    content = bytearray(HONEST)
    for place, value in flips:
        content[place] = value
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(content[:length])
    try:
        assert render(describe(path))
        with open_checkpoint(path) as checkpoint:
            for name, info in checkpoint.tensors.items():
                assert checkpoint.rows(name).size == info.n_bytes
                if info.type.kind == "integer":
                    assert checkpoint.array(name).shape == info.shape
                else:
                    assert checkpoint.float32(name).shape == info.shape
    except StrataError as error:
        assert "\n" not in str(error)
