"""GGUF files that lie or are damaged (C01, C03, C04): one clear error, bounded time and memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.formats.gguf_writer import (
    TYPE_IDS,
    Tensor,
    f32_tensor,
    gguf_bytes,
    header_bytes,
    key_bytes,
    string,
)

from strata.core.errors import FormatError, StrataError
from strata.formats.checkpoint import open_checkpoint
from strata.formats.gguf import read_gguf
from strata.formats.inspect import describe, render
from strata.formats.mapped import MappedFile


def refused(path: Path, content: bytes) -> str:
    """The error message for a file with this content."""
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_gguf(MappedFile(path))
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def array_head(name: str, item_type: int, count: int) -> bytes:
    """A metadata entry up to the items of an array."""
    return string(name) + struct.pack("<IIQ", TYPE_IDS["array"], item_type, count)


LYING = {
    "key length 2^52": header_bytes(0, 1) + struct.pack("<Q", 2**52) + b"general",
    "key length 2^64-1": header_bytes(0, 1) + struct.pack("<Q", 2**64 - 1) + b"general",
    "value length 2^52": header_bytes(0, 1) + string("k") + struct.pack("<IQ", 8, 2**52) + b"abc",
    "array of 2^60 bytes": header_bytes(0, 1) + array_head("k", 0, 2**60) + b"\0" * 9,
    "array of 2^60 strings": header_bytes(0, 1) + array_head("k", 8, 2**60) + b"\0" * 9,
    "array of 2^60 arrays": header_bytes(0, 1) + array_head("k", 9, 2**60) + b"\0" * 9,
    "array of 2^61 f64": header_bytes(0, 1) + array_head("k", 12, 2**61) + b"\0" * 9,
    "string in array 2^63": header_bytes(0, 1)
    + array_head("k", 8, 2)
    + struct.pack("<QQ", 2**63, 2**63),
    "string in array 2^64-1": header_bytes(0, 1)
    + array_head("k", 8, 2)
    + struct.pack("<QQ", 2**64 - 1, 1),
    "2^62 keys": header_bytes(0, 2**62) + b"\0" * 40,
    "2^62 tensors": header_bytes(2**62, 0) + b"\0" * 40,
    "tensor name 2^52": header_bytes(1, 0) + struct.pack("<Q", 2**52) + b"abc" + b"\0" * 40,
    "2^31 axes": header_bytes(1, 0) + string("t") + struct.pack("<I", 2**31) + b"\0" * 40,
}


@pytest.mark.parametrize("name", LYING)
def test_lengths_that_lie(tmp_path: Path, name: str) -> None:
    # C03 (a), (b): a file of under 100 bytes is refused in under 1 s and 50 MB
    content = LYING[name]
    assert len(content) < 100
    tracemalloc.start()
    started = time.perf_counter()
    try:
        refused(tmp_path / "lie.gguf", content)
        seconds, peak_bytes = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1 and peak_bytes < 50e6


def test_last_string_past_the_end_is_named(tmp_path: Path) -> None:
    # expectation: also the very last bytes of a file are checked, where nothing follows
    content = header_bytes(0, 1) + array_head("k", 8, 1) + struct.pack("<Q", 5) + b"abc"
    message = refused(tmp_path / "lie.gguf", content)
    assert "the 1 strings of 'k' run past the end" in message


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    # expectation: no recursion error; 12 bytes a level would allow 80,000 levels in a MB
    content = header_bytes(0, 1) + string("k") + struct.pack("<I", 9)
    content += struct.pack("<IQ", 9, 1) * 80_000
    assert "nests arrays" in refused(tmp_path / "deep.gguf", content)


def test_many_inner_arrays_are_refused(tmp_path: Path) -> None:
    # expectation: Python objects for 80,000 empty arrays would weigh 20 times their bytes
    content = header_bytes(0, 1) + array_head("k", 9, 80_000) + struct.pack("<IQ", 0, 0) * 80_000
    assert "nests arrays" in refused(tmp_path / "wide.gguf", content)


@pytest.mark.parametrize("type_id", [13, 255, 2**31])
def test_unknown_value_types(tmp_path: Path, type_id: int) -> None:
    # expectation: a value of unknown size cannot be skipped, so the file is refused
    value = header_bytes(0, 1) + string("odd") + struct.pack("<I", type_id) + bytes(16)
    assert f"unknown value type {type_id}" in refused(tmp_path / "a.gguf", value)
    items = header_bytes(0, 1) + array_head("odd", type_id, 2) + bytes(16)
    assert f"unknown item type {type_id}" in refused(tmp_path / "a.gguf", items)


def test_duplicate_key_names_both_places(tmp_path: Path) -> None:
    # C04's kind, for metadata: places are the byte offsets of the two entries
    first, second = key_bytes("same", "u32", 1), key_bytes("same", "u32", 2)
    message = refused(tmp_path / "a.gguf", header_bytes(0, 2) + first + second)
    assert "'same'" in message and f"bytes 24 and {24 + len(first)}" in message


def test_duplicate_tensor_names_both_places(tmp_path: Path) -> None:
    # C04: layer 1 and layer 10 share a beginning only and are no duplicates
    tensors = [f32_tensor("blk.1.w", 4), f32_tensor("blk.10.w", 4), f32_tensor("blk.1.w", 4)]
    message = refused(tmp_path / "a.gguf", gguf_bytes([], tensors))
    entry = 8 + len("blk.1.w") + 4 + 8 + 4 + 8
    assert "'blk.1.w'" in message and f"bytes 24 and {24 + entry + entry + 1}" in message
    assert "blk.10" not in message
    path = tmp_path / "b.gguf"
    path.write_bytes(gguf_bytes([], tensors[:2]))
    assert [t.name for t in read_gguf(MappedFile(path)).tensors] == ["blk.1.w", "blk.10.w"]


def test_cut_file_names_tensor_and_missing_bytes(tmp_path: Path) -> None:
    # C01 (a): 64 bytes cut off; the last two tensors have 32 bytes each, so the first past the end
    # is the last but one
    tensors = [f32_tensor("a", 8), f32_tensor("b", 8), f32_tensor("c", 8)]
    content = gguf_bytes([], tensors)
    message = refused(tmp_path / "cut.gguf", content[:-64])
    assert "64 bytes are missing" in message and "'b'" in message and "2 tensors" in message


def test_missing_bytes_count_padding_apart(tmp_path: Path) -> None:
    # C01 (a): 16 bytes of data are padded to 32; of 64 bytes cut off, 48 were data
    content = gguf_bytes([], [f32_tensor("a", 16), f32_tensor("b", 4)])
    message = refused(tmp_path / "cut.gguf", content[:-64])
    assert "48 bytes are missing (64 with the padding behind it)" in message


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    # expectation: no prefix of a file is a file (its last tensor fills its alignment)
    keys = [("a", "str", "x"), ("b", "array", ("str", ["p", "q"])), ("c", "array", ("u32", [1]))]
    content = gguf_bytes(keys, [f32_tensor("t", 8)])
    for length in range(len(content)):
        refused(tmp_path / "cut.gguf", content[:length])


def test_misaligned_offset(tmp_path: Path) -> None:
    # expectation: the format's rule that offsets are multiples of the alignment
    tensors = [Tensor("t", (4,), 0, bytes(64), offset=16)]
    assert "multiple of the alignment 32" in refused(tmp_path / "a.gguf", gguf_bytes([], tensors))


def test_overlapping_tensors_name_both(tmp_path: Path) -> None:
    # expectation: two tensors never share bytes in a GGUF file
    tensors = [f32_tensor("first", 16), Tensor("second", (8,), 0, bytes(32), offset=32)]
    message = refused(tmp_path / "a.gguf", gguf_bytes([], tensors))
    assert "overlap" in message and "'first'" in message and "'second'" in message


@pytest.mark.parametrize(
    ("ne", "offset"), [((2**40,), 0), ((2**32, 2**32), 0), ((4,), 2**64 - 32), ((4,), 2**63)]
)
def test_sizes_that_overflow(tmp_path: Path, ne: tuple[int, ...], offset: int) -> None:
    # expectation: sums and products beyond 64 bits are compared, not wrapped
    content = gguf_bytes([], [Tensor("huge", ne, 0, bytes(32), offset=offset)])
    message = refused(tmp_path / "a.gguf", content)
    assert "'huge'" in message


def test_empty_tensor_cannot_hide_an_absurd_axis(tmp_path: Path) -> None:
    # expectation: numpy refuses such a shape even with 0 elements, so we must before it
    content = gguf_bytes([], [Tensor("t", (0, 2**63), 0, b"")])
    assert "not credible" in refused(tmp_path / "a.gguf", content)


def test_more_axes_than_ggml_has(tmp_path: Path) -> None:
    # expectation: GGML_MAX_DIMS is 4
    content = gguf_bytes([], [Tensor("t", (1, 1, 1, 1, 8), 0, bytes(32))])
    assert "5 axes" in refused(tmp_path / "a.gguf", content)


def test_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    # expectation: Q8_0 has blocks of 32 (ggml)
    content = gguf_bytes([], [Tensor("t", (48,), 8, bytes(64))])
    message = refused(tmp_path / "a.gguf", content)
    assert "'t'" in message and "Q8_0" in message and "48" in message


def test_names_cannot_break_the_line(tmp_path: Path) -> None:
    # expectation: error messages are one line whatever the file calls its tensors
    name = "x\n\x1b[31m" + "y" * 50_000
    message = refused(tmp_path / "a.gguf", gguf_bytes([], [f32_tensor(name, 4)] * 2))
    assert "\x1b" not in message and len(message) < 1000


HONEST = gguf_bytes(
    [
        ("general.architecture", "str", "tiny"),
        ("tokens", "array", ("str", ["a", "bc", ""])),
        ("scores", "array", ("f32", [0.5, 1.5])),
        ("nested", "array", ("array", [("u8", [1]), ("str", ["z"])])),
        ("flag", "bool", True),
    ],
    [f32_tensor("w", 2, 4), Tensor("q", (32, 2), 8, bytes(range(68))), f32_tensor("v", 3)],
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
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(content[:length])
    try:
        assert render(describe(path))
        with open_checkpoint(path) as checkpoint:
            for name, info in checkpoint.tensors.items():
                assert checkpoint.raw(name).size == info.n_bytes
                assert checkpoint.rows(name).size == info.n_bytes
                if info.type.kind != "integer":
                    assert checkpoint.float32(name).shape == info.shape
    except StrataError as error:
        assert "\n" not in str(error)
