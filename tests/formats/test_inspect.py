"""The listing of a checkpoint (C05): everything is shown, nothing in a file can upset it."""

from __future__ import annotations

from pathlib import Path

from tests.formats.gguf_writer import Q8_0, Tensor, f32_tensor, gguf_bytes
from tests.formats.safetensors_writer import f32, write_indexed

from strata.formats.inspect import describe, render


def test_unknown_and_retired_types_are_marked(tmp_path: Path) -> None:
    # C05: every tensor is printed, these two with their numbers
    path = tmp_path / "model.gguf"
    tensors = [
        f32_tensor("first", 8),
        Tensor("odd", (64, 2), 199, bytes(64)),
        Tensor("old", (64,), 4, bytes(64)),
        Tensor("last", (32,), Q8_0, bytes(34)),
    ]
    path.write_bytes(gguf_bytes([], tensors))
    description = describe(path)
    lines = render(description)
    rows = {line.split()[0]: line for line in lines if line.startswith("  ") and "[" in line}
    assert list(rows) == ["first", "odd", "old", "last"]
    assert "199 (unknown)" in rows["odd"] and "4 (retired: Q4_2)" in rows["old"]
    assert "?" in rows["odd"] and "?" not in rows["last"]
    assert [t.readable for t in description.tensors] == [True, False, False, True]
    assert [t.n_bytes for t in description.tensors] == [32, None, None, 34]
    assert any("cannot be loaded: 2 tensors" in line for line in lines)


def test_description_of_a_gguf(tmp_path: Path) -> None:
    # expectation: the keys, shapes, offsets and sizes that were written
    path = tmp_path / "model.gguf"
    keys = [
        ("general.architecture", "str", "tiny"),
        ("tokens", "array", ("str", [f"t{i}" for i in range(1000)])),
        ("scores", "array", ("f32", [0.5, 1.0])),
        ("nested", "array", ("array", [("u8", [1, 2])])),
        ("template", "str", "x" * 5000),
        ("rate", "f32", 0.1),
    ]
    tensors = [
        f32_tensor("a", 2, 4),
        f32_tensor("b", 8, start=9),
        Tensor("q", (32,), Q8_0, bytes(34)),
    ]
    content = gguf_bytes(keys, tensors)
    path.write_bytes(content)
    description = describe(path)
    values = {entry.key: (entry.type, entry.value) for entry in description.metadata}
    assert values["general.architecture"] == ("str", "'tiny'")
    assert values["tokens"] == (
        "array of str",
        "['t0', 't1', 't2', 't3', 't4', 't5', ...] (1,000 items)",
    )
    assert values["scores"] == ("array of f32", "[0.5, 1] (2 items)")
    assert values["nested"] == ("array of arrays", "[[1, 2] (2 items)] (1 item)")
    assert values["rate"] == ("f32", "0.100000001")
    assert len(values["template"][1]) < 200 and "5000 characters" in values["template"][1]
    assert description.files == (("model.gguf", len(content)),)
    assert [(t.name, t.shape, t.n_bytes) for t in description.tensors] == [
        ("a", (2, 4), 32),
        ("b", (8,), 32),
        ("q", (32,), 34),
    ]
    assert description.tensors[1].offset == content.index(tensors[1].data)
    assert [(t.type, t.n_tensors, t.n_elements, t.n_bytes) for t in description.totals] == [
        ("F32", 2, 16, 64),
        ("Q8_0", 1, 32, 34),
    ]


def test_description_of_a_set_names_the_files(tmp_path: Path) -> None:
    # expectation: each tensor with the file it is in, and config.json's keys
    write_indexed(tmp_path, {"one.safetensors": {"a": f32(4)}, "two.safetensors": {"b": f32(2)}})
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "layers": ["x", "y"]}')
    description = describe(tmp_path)
    assert [(t.name, t.file) for t in description.tensors] == [
        ("a", "one.safetensors"),
        ("b", "two.safetensors"),
    ]
    assert [(e.key, e.type, e.value) for e in description.config] == [
        ("model_type", "str", "'tiny'"),
        ("layers", "list", "['x', 'y']"),
    ]
    lines = render(description)
    assert any("two.safetensors" in line and line.split()[0] == "b" for line in lines)
    short = render(description, tensors=False)
    assert not any(line.split()[:1] == ["b"] for line in short)
    assert any("F32: 2 tensors, 6 numbers, 24 bytes" in line for line in short)


def test_text_from_the_file_is_escaped(tmp_path: Path) -> None:
    # expectation: no control character and no broken text reaches the terminal
    path = tmp_path / "model.gguf"
    evil = "\x1b[2J\r\nowned"
    keys = [(evil, "str", evil), ("b", "str", b"\xff\xfe"), ("t", "array", ("str", [evil]))]
    path.write_bytes(gguf_bytes(keys, [f32_tensor(evil, 8)]))
    for line in render(describe(path)):
        assert line.isprintable()
        line.encode("utf-8")


def test_file_without_tensors(tmp_path: Path) -> None:
    # expectation: a metadata-only file is a legal GGUF
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([("a", "u32", 1)]))
    assert any("0 tensors" in line for line in render(describe(path)))
