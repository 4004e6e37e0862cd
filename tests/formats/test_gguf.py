"""The GGUF reader on honest files: our own writer's and the ``gguf`` package's, by value."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.formats.gguf_writer import BF16, F16, Q8_0, Tensor, f32_tensor, gguf_bytes

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.gguf import GgufFile, read_gguf
from strata.formats.mapped import MappedFile
from strata.formats.string_array import StringArray


def read(path: Path, content: bytes) -> GgufFile:
    """Write ``content`` to ``path`` and read it back; the mapping is freed with the result."""
    path.write_bytes(content)
    return read_gguf(MappedFile(path))


SCALARS = [
    ("u8", 255), ("i8", -128), ("u16", 65535), ("i16", -32768), ("u32", 2**32 - 1),
    ("i32", -(2**31)), ("f32", 0.5), ("bool", True), ("bool", False), ("str", "h\u00e9llo"),
    ("u64", 2**64 - 1), ("i64", -(2**63)), ("f64", 0.1),
]  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_type(tmp_path: Path, version: int) -> None:
    # expectation: the values handed to the writer, extremes of each type
    keys = [(f"key.{i}", kind, value) for i, (kind, value) in enumerate(SCALARS)]
    opened = read(tmp_path / "a.gguf", gguf_bytes(keys, version=version))
    assert list(opened.metadata.items()) == [(key, value) for key, _, value in keys]
    assert [type(v) for v in opened.metadata.values()] == [type(v) for _, v in SCALARS]
    assert list(opened.metadata_types.values()) == [kind for kind, _ in SCALARS]


@pytest.mark.parametrize(
    ("kind", "items"),
    [
        ("u8", [0, 255]), ("i8", [-128, 127]), ("u16", [1, 65535]), ("i16", [-32768, 5]),
        ("u32", [7, 2**32 - 1]), ("i32", [-1, 2]), ("f32", [0.25, -1e30]), ("bool", [True, False]),
        ("u64", [2**64 - 1]), ("i64", [-(2**63), 1]), ("f64", [0.1, 1e300]), ("u32", []),
    ],
)  # fmt: skip
def test_numeric_arrays_are_numpy(tmp_path: Path, kind: str, items: list[Any]) -> None:
    # expectation: the items written; read-only because they may be views of the file
    opened = read(tmp_path / "a.gguf", gguf_bytes([("list", "array", (kind, items))]))
    array = opened.metadata["list"]
    assert isinstance(array, np.ndarray) and not array.flags.writeable
    expected = np.array(items, {"f32": np.float32, "f64": np.float64}.get(kind, object))
    assert array.tolist() == expected.tolist()
    assert (array.dtype == np.bool_) == (kind == "bool")
    assert opened.metadata_types["list"] == f"array of {kind}"


def test_nested_arrays(tmp_path: Path) -> None:
    # expectation: the nesting written; an empty inner array must not shift what follows
    value = ("array", [("u32", [1, 2]), ("str", ["a", "b"]), ("f32", []), ("array", [("u8", [3])])])
    opened = read(
        tmp_path / "a.gguf", gguf_bytes([("n", "array", value), ("after", "str", "still here")])
    )
    outer = opened.metadata["n"]
    assert isinstance(outer, list) and len(outer) == 4
    assert np.asarray(outer[0]).tolist() == [1, 2]
    assert isinstance(outer[1], StringArray) and outer[1].tolist() == ["a", "b"]
    assert np.asarray(outer[2]).size == 0
    assert isinstance(outer[3], list) and np.asarray(outer[3][0]).tolist() == [3]
    assert opened.metadata["after"] == "still here"


def test_string_array_reads_like_a_list(tmp_path: Path) -> None:
    # expectation: a plain Python list of the same strings
    texts = ["", "a", "\u0120the", "x" * 300, "\U0001f600", "end"]
    opened = read(tmp_path / "a.gguf", gguf_bytes([("t", "array", ("str", texts))]))
    array = opened.metadata["t"]
    assert isinstance(array, StringArray)
    assert array.tolist() == texts == list(array) == [array[i] for i in range(len(array))]
    assert array[-1] == texts[-1] and array[1:4] == texts[1:4] and array[::-2] == texts[::-2]
    assert "\u0120the" in array and array.index("a") == 1
    assert array.to_bytes() == [text.encode() for text in texts]
    with pytest.raises(IndexError):
        array[len(texts)]


def test_invalid_utf8_survives(tmp_path: Path) -> None:
    # expectation: the very bytes written; decoding with surrogate escapes is reversible by design
    raw = [b"\xff\xfe", b"ok", b"\xe4\xb8", b"\x80"]
    opened = read(
        tmp_path / "a.gguf",
        gguf_bytes([("t", "array", ("str", raw)), ("name", "str", b"caf\xe9")]),
    )
    array = opened.metadata["t"]
    assert isinstance(array, StringArray)
    assert array.to_bytes() == raw and array.bytes_at(2) == raw[2]
    assert [text.encode("utf-8", "surrogateescape") for text in array.tolist()] == raw
    assert str(opened.metadata["name"]).encode("utf-8", "surrogateescape") == b"caf\xe9"


def test_tensor_table(tmp_path: Path) -> None:
    # expectation: shapes are ne reversed, offsets point at the bytes written, table order is kept
    tensors = [
        f32_tensor("b.weight", 2, 3, 4),
        Tensor("a.weight", (64, 2), Q8_0, bytes(range(136))),
        Tensor("half", (3,), F16, b"\x01\x02\x03\x04\x05\x06"),
        Tensor("brain", (), BF16, b"\x80\x3f"),
        Tensor("none", (4, 0), 0, b""),
    ]
    path = tmp_path / "a.gguf"
    opened = read(path, gguf_bytes([("general.alignment", "u32", 64)], tensors, alignment=64))
    content = path.read_bytes()
    assert [t.name for t in opened.tensors] == ["b.weight", "a.weight", "half", "brain", "none"]
    assert [t.shape for t in opened.tensors] == [(2, 3, 4), (2, 64), (3,), (), (0, 4)]
    assert [t.type.name for t in opened.tensors] == ["F32", "Q8_0", "F16", "BF16", "F32"]
    assert [t.n_bytes for t in opened.tensors] == [96, 136, 6, 2, 0]
    for tensor, info in zip(tensors, opened.tensors, strict=True):
        assert info.offset % 64 == 0 and info.path == path
        assert content[info.offset : info.offset + info.n_bytes] == tensor.data


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    # expectation: llama.cpp's own Python writer, a code base independent of ours
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_int64("big", -(2**40))
    writer.add_token_list([b"a", "\u0120b".encode(), b"\xff"])
    writer.add_token_scores([0.0, -1.5, 2.25])
    writer.add_array("mixed", [[1, 2], [3]])
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("m", matrix)
    blocks = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = MappedFile(path)
    opened = read_gguf(file)
    assert opened.metadata["general.architecture"] == "llama"
    assert opened.metadata["llama.block_count"] == 2
    assert opened.metadata["llama.rope.freq_base"] == 10000.0
    assert opened.metadata["tokenizer.ggml.add_bos_token"] is False
    assert opened.metadata["big"] == -(2**40)
    tokens = opened.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert tokens.to_bytes() == [b"a", "\u0120b".encode(), b"\xff"]
    assert np.asarray(opened.metadata["tokenizer.ggml.scores"]).tolist() == [0.0, -1.5, 2.25]
    nested = opened.metadata["mixed"]
    assert isinstance(nested, list) and [np.asarray(n).tolist() for n in nested] == [[1, 2], [3]]
    m, q = opened.tensors
    assert (m.shape, m.type.name, q.shape, q.type.name) == ((3, 4), "F32", (2, 32), "Q8_0")
    assert file.view(m.offset, m.n_bytes).tobytes() == matrix.tobytes()
    assert file.view(q.offset, q.n_bytes).tobytes() == blocks.tobytes()


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"PACK" + bytes(40), FormatError, "not a GGUF file"),
        (b"GG", FormatError, "magic number"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedError, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), UnsupportedError, "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
        (b"", FormatError, "empty"),
    ],
)
def test_other_files_are_named(
    tmp_path: Path, content: bytes, error: type[Exception], words: str
) -> None:
    # expectation: the format's magic and version numbers; big-endian files have the version swapped
    with pytest.raises(error, match=words):
        read(tmp_path / "a.gguf", content)


@pytest.mark.parametrize("alignment", [("u32", 0), ("u32", 48), ("str", "32"), ("i32", -32)])
def test_alignment_must_be_a_power_of_two(tmp_path: Path, alignment: tuple[str, Any]) -> None:
    # expectation: the format's rule; 0 must not end in a division by zero
    with pytest.raises(FormatError, match=r"general\.alignment"):
        read(tmp_path / "a.gguf", gguf_bytes([("general.alignment", *alignment)]))
