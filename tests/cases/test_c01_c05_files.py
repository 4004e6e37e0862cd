"""C01 to C05 through the public doors: file sets that are cut, incomplete, mixed up or lying.

Expectations: what was done to the files. The readers' own tests are in tests/formats.
"""

from __future__ import annotations

import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from strata import cli
from tests.cases.kit import load, peak_rss_bytes, refused
from tests.cases.tiny import (
    Sizes,
    Weights,
    config,
    draw,
    gguf_keys,
    gguf_name,
    gguf_tensor,
    stacked,
    write_folder,
    write_gguf,
    write_gguf_parts,
)
from tests.formats.gguf_writer import (
    F32,
    TYPE_IDS,
    Tensor,
    gguf_bytes,
    header_bytes,
    key_bytes,
    string,
)

SIZES = Sizes()
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return draw(SIZES)


@pytest.fixture(scope="module")
def piles(weights: Weights) -> Weights:
    return stacked(weights, SIZES, fused=False)


def cut(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-n_bytes])


@pytest.mark.parametrize("n_cut", [1, 64, 5000])
@pytest.mark.parametrize("opened_by", ["folder", "first", "second"])
def test_c01a_gguf_part_cut_short(
    n_cut: int,
    opened_by: str,
    piles: Weights,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = write_gguf_parts(tmp_path, "tiny", piles, gguf_keys(SIZES), 2)
    cut(parts[1], n_cut)
    path = {"folder": tmp_path, "first": parts[0], "second": parts[1]}[opened_by]
    # the tail of the file, from its last tensor back: sizes are multiples of the alignment
    tail = list(piles)[-1:-10:-1]
    passed, name = 0, ""
    for name in tail:
        passed += piles[name].nbytes
        if passed >= n_cut:
            break
    refused(path, capsys, parts[1].name, f"{n_cut} bytes", f"'{gguf_name(name)}'")


@pytest.mark.parametrize("n_cut", [1, 64])
def test_c01a_safetensors_file_cut_short(
    n_cut: int, weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path, weights, config(SIZES), n_files=2)
    second = folder / "model-00002-of-00002.safetensors"
    cut(second, n_cut)
    for path in (folder, second, folder / "model-00001-of-00002.safetensors"):
        refused(path, capsys, second.name, f"{n_cut} bytes", "past the end")


def test_c01b_missing_parts_are_all_named(
    weights: Weights, piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = write_gguf_parts(tmp_path / "g", "tiny", piles, gguf_keys(SIZES), 4)
    parts[1].unlink()
    parts[3].unlink()
    for path in (tmp_path / "g", parts[0], parts[2]):
        refused(path, capsys, parts[1].name, parts[3].name)
    folder = write_folder(tmp_path / "s", weights, config(SIZES), n_files=4)
    gone = [folder / f"model-0000{i}-of-00004.safetensors" for i in (2, 3)]
    for path in gone:
        path.unlink()
    for path in (folder, folder / "model.safetensors.index.json"):
        refused(path, capsys, *(path.name for path in gone))


def test_c01_zero_bytes_and_wrong_contents(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty part, a part that is a web page, a part replaced by its neighbour, a link to
    nothing."""
    parts = write_gguf_parts(tmp_path, "tiny", piles, gguf_keys(SIZES), 3)
    good = parts[1].read_bytes()
    parts[1].write_bytes(b"")
    refused(tmp_path, capsys, parts[1].name, "empty")
    parts[1].write_bytes(b"<!DOCTYPE html><title>404</title>")
    refused(tmp_path, capsys, parts[1].name, "not a GGUF")
    shutil.copy(parts[2], parts[1])
    refused(tmp_path, capsys, parts[1].name)
    parts[1].unlink()
    parts[1].symlink_to(tmp_path / "blobs" / "gone")
    refused(tmp_path, capsys, parts[1].name)
    parts[1].unlink()
    parts[1].write_bytes(good)
    load(tmp_path).close()


def test_c01_a_hole_of_zeros_in_the_header(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download that was preallocated and never filled: right size, nothing but zeros."""
    path = write_gguf(tmp_path / "a.gguf", piles, gguf_keys(SIZES))
    path.write_bytes(bytes(path.stat().st_size))
    refused(path, capsys, "a.gguf")
    folder = write_folder(tmp_path / "s", piles, config(SIZES))
    file = folder / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    refused(folder, capsys, "model.safetensors")


def test_c02_any_part_or_the_folder(piles: Weights, tmp_path: Path) -> None:
    """Same tensors, metadata, text and logits, whichever part is named."""
    parts = write_gguf_parts(tmp_path / "set", "tiny", piles, gguf_keys(SIZES), 3)
    whole = write_gguf(tmp_path / "whole.gguf", piles, gguf_keys(SIZES))
    with load(whole) as model:
        expected = model.logits(IDS)
        text = [event.text for event in model.generate("hello", max_tokens=6)]
    for path in (*parts, tmp_path / "set"):
        with load(path) as model:
            assert np.array_equal(model.logits(IDS), expected)
            assert [event.text for event in model.generate("hello", max_tokens=6)] == text


def test_c02_two_sets_in_one_folder(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused and both named, also when the second is a single file or has other part counts."""
    first = write_gguf_parts(tmp_path, "tiny-a", piles, gguf_keys(SIZES), 2)
    second = write_gguf_parts(tmp_path, "tiny-b", piles, gguf_keys(SIZES), 3)
    refused(tmp_path, capsys, "tiny-a", "tiny-b")
    load(second[2]).close()
    for path in second:
        path.unlink()
    write_gguf(tmp_path / "other.gguf", piles, gguf_keys(SIZES))
    refused(tmp_path, capsys, "tiny-a", "other.gguf")
    load(first[1]).close()


def test_c03_lengths_that_lie_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under 100 bytes, under 1 s, under 50 MB; also by the listing tool."""
    text, array, u32 = (struct.pack("<I", TYPE_IDS[k]) for k in ("str", "array", "u32"))
    lies = {
        "key": header_bytes(0, 1) + struct.pack("<Q", 1 << 52) + b"general",
        "value": header_bytes(0, 1) + string("k") + text + struct.pack("<Q", 1 << 63),
        "array": header_bytes(0, 1) + string("k") + array + u32 + struct.pack("<Q", 1 << 60),
        "strings": header_bytes(0, 1) + string("k") + array + text + struct.pack("<Q", 1 << 60),
        "nested": header_bytes(0, 1) + string("k") + array + array + struct.pack("<Q", 1 << 60),
        "tensors": header_bytes(1 << 60, 0),
        "keys": header_bytes(0, 1 << 60),
    }
    for name, content in lies.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        assert len(content) < 100
        before, start = peak_rss_bytes(), time.perf_counter()
        refused(path, capsys, path.name)
        assert cli.main(["inspect", str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert time.perf_counter() - start < 3, name  # three attempts
        assert peak_rss_bytes() - before < 50 << 20, name


def test_c04_the_same_tensor_twice(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one file and in two parts; in safetensors too. Layers 1 and 10 are no duplicates."""
    name = "model.layers.1.input_layernorm.weight"
    made = [gguf_tensor(n, t) for n, t in piles.items()]
    twice = gguf_tensor(name, piles[name] * 2)
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(gguf_keys(SIZES), [*made, twice]))
    refused(path, capsys, "'blk.1.attn_norm.weight'", "twice")
    parts = write_gguf_parts(tmp_path / "g", "tiny", piles, gguf_keys(SIZES), 2)
    split = [("split.no", "u16", 1), ("split.count", "u16", 2)]
    early = gguf_tensor("model.embed_tokens.weight", piles["model.embed_tokens.weight"])
    parts[1].write_bytes(gguf_bytes(split, [*made[(len(made) + 1) // 2 :], early]))
    refused(tmp_path / "g", capsys, "'token_embd.weight'", parts[0].name, parts[1].name)
    folder = write_folder(tmp_path / "s", piles, config(SIZES), n_files=2)
    (folder / "model.safetensors.index.json").unlink()
    second = folder / "model-00002-of-00002.safetensors"
    shutil.copy(folder / "model-00001-of-00002.safetensors", second)
    refused(folder, capsys, "'model.embed_tokens.weight'", second.name, "model-00001")


def test_c04_twelve_layers_have_no_duplicates(tmp_path: Path) -> None:
    sizes = Sizes(layers=12, experts=2, active=1)
    tensors = stacked(draw(sizes), sizes, fused=False)
    load(write_gguf(tmp_path / "a.gguf", tensors, gguf_keys(sizes))).close()
    load(write_folder(tmp_path / "s", tensors, config(sizes), n_files=3)).close()


def test_c05_unknown_and_retired_types(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """199 was never assigned, 4 and 31 are retired: listed with their numbers, refused together."""
    made = [gguf_tensor(n, t) for n, t in piles.items()]
    odd = {"blk.0.ffn_up_exps.weight": 199, "blk.1.attn_q.weight": 4, "blk.1.attn_k.weight": 31}
    path = tmp_path / "a.gguf"
    path.write_bytes(
        gguf_bytes(
            gguf_keys(SIZES),
            [Tensor(t.name, t.ne, odd[t.name], bytes(64)) if t.name in odd else t for t in made],
        )
    )
    refused(path, capsys, *odd, "199", "4", "31", "3 tensors")
    assert cli.main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for tensor in made:
        (line,) = [x for x in shown.splitlines() if x.split()[:1] == [tensor.name]]
        assert (str(odd.get(tensor.name)) in line) == (tensor.name in odd), line


def test_c05_a_known_type_with_rows_of_half_a_block(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    q4_k = 12
    made = [gguf_tensor(n, t) for n, t in piles.items()]
    made[0] = Tensor(made[0].name, made[0].ne, q4_k, bytes(144))
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(gguf_keys(SIZES), made))
    refused(path, capsys, "token_embd.weight", "256")


def test_c03_key_types_that_lie(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings of the wrong kind or an impossible size: one clear line that names the key."""
    changes = {
        "qwen3moe.block_count": [("str", "two"), ("u32", 0), ("u32", 1 << 31), ("f32", 2.0)],
        "qwen3moe.expert_count": [("u32", 0), ("u32", 9), ("i32", -1)],
        "qwen3moe.expert_used_count": [("u32", 0), ("u32", 9)],
        "qwen3moe.attention.head_count": [("u32", 0), ("u32", 3), ("array", ("u32", [4, 2]))],
        "qwen3moe.attention.key_length": [("u32", 0), ("u32", 15), ("u32", 1 << 30)],
        "qwen3moe.embedding_length": [("u32", 0), ("u32", 31), ("u64", 1 << 62)],
        "qwen3moe.context_length": [("u32", 0), ("i32", -5)],
        "qwen3moe.attention.layer_norm_rms_epsilon": [("f32", float("nan")), ("str", "x")],
        "qwen3moe.rope.freq_base": [("f32", float("inf")), ("f32", 0.0), ("f32", -1.0)],
        "general.architecture": [("u32", 5), ("str", ""), ("str", "qwen3moo")],
    }
    made = [gguf_tensor(n, t) for n, t in piles.items()]
    keys = gguf_keys(SIZES)
    path = tmp_path / "a.gguf"
    for key, values in changes.items():
        for kind, value in values:
            changed = [(key, kind, value) if k[0] == key else k for k in keys]
            path.write_bytes(gguf_bytes(changed, made))
            refused(path, capsys)


def test_c03_files_of_every_length(piles: Weights, tmp_path: Path) -> None:
    """Cut anywhere in its header, a file is refused and never crashes the listing."""
    whole = gguf_bytes(gguf_keys(SIZES), [gguf_tensor(n, t) for n, t in piles.items()])
    path = tmp_path / "a.gguf"
    for n in range(0, 9000, 307):
        path.write_bytes(whole[:n])
        assert cli.main(["inspect", str(path)]) == 2


def test_c03_nothing_follows_a_refusal(piles: Weights, tmp_path: Path) -> None:
    """A good file loads right after a refused one, in the same process."""
    bad, good = tmp_path / "bad.gguf", tmp_path / "good.gguf"
    write_gguf(good, piles, gguf_keys(SIZES))
    bad.write_bytes(good.read_bytes()[:-64])
    with load(good) as model:
        expected = model.logits(IDS)
    assert cli.main(["run", str(bad), "hi", "--device", "cpu", "--quiet"]) == 2
    with load(good) as model:
        assert np.array_equal(model.logits(IDS), expected)
        assert torch.is_grad_enabled()


def test_c05_empty_tensor(
    piles: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [gguf_tensor(n, t) for n, t in piles.items()]
    made[1] = Tensor(made[1].name, (0,), F32, b"")
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(gguf_keys(SIZES), made))
    refused(path, capsys, made[1].name)


def test_c03_a_key_given_as_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 in a value do not stop the listing."""
    path = tmp_path / "a.gguf"
    path.write_bytes(header_bytes(0, 1) + key_bytes("general.name", "str", b"\xff\xfe") + b"\0" * 8)
    assert cli.main(["inspect", str(path)]) == 0
