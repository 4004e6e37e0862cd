"""Packs: the same bytes on the next start, and refusal of everything stale, damaged or foreign.

Expectations: bytes from ``load_experts``; refusals name the file and what to do (house rule).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from strata.core.errors import FormatError, InputError
from strata.experts import pack as packs
from strata.experts.layouts import choose_layouts, impose_layouts
from strata.experts.loader import load_experts
from strata.experts.pack import check_pack, load_pack, open_pack, require_room, write_pack
from strata.formats.checkpoint import open_checkpoint
from tests.experts.made_up import MadeUpExperts

SOURCE = MadeUpExperts(256, 64, 5, (("Q4_K", "Q6_K", "Q4_0"), None, ("F16", "IQ3_S", "MXFP4")))
HASH = "0123"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3_moe" / "q8_0.gguf"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A pack with several pieces a layer, some matrices in tiles."""
    monkeypatch.setattr("strata.experts.pieces.PIECE_BYTES", 100_000)
    native = SOURCE.shapes()
    shapes = choose_layouts(native, "tiles", reads_tiles=True, fits=lambda s: True).shapes
    store = load_experts(shapes, SOURCE)
    folder, seen = tmp_path / "packs" / "one", []
    write_pack(folder, HASH, store, lambda *step: seen.append(step), workers=2)
    return SimpleNamespace(folder=folder, native=native, shapes=shapes, store=store, seen=seen)


def read(made, shapes=None, checkpoint_hash=HASH):
    pack = open_pack(made.folder, checkpoint_hash, made.native)
    assert pack is not None
    check_pack(pack, made.shapes if shapes is None else shapes)
    return pack, load_pack(pack, made.shapes, workers=2)


def test_the_next_start_has_the_same_bytes(made):
    pack, store = read(made)
    for layer in SOURCE.layers:
        assert torch.equal(store.layer(layer).blobs, made.store.layer(layer).blobs)
    assert store.layers[1] is None
    assert [x and x.layouts for x in pack.layers] == [
        ("tiles",) * 3, None, ("native", "tiles", "tiles"),
    ]  # fmt: skip
    assert sorted(p.name for p in made.folder.iterdir()) == [
        "layer-000.bin", "layer-002.bin", "manifest.json",
    ]  # fmt: skip
    done = [step[1] for step in made.seen]
    assert done == sorted(done) and {step[0] for step in made.seen} == {"pack"}
    assert made.seen[-1][1] == made.seen[-1][2] == made.store.n_bytes


def test_a_flipped_bit_is_found(made):
    path = made.folder / "layer-002.bin"
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=r"layer-002.bin is damaged: experts 4 to 4.*remove"):
        read(made)


def test_files_of_other_sizes_are_refused(made):
    path = made.folder / "layer-000.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(FormatError, match=f"layer-000.bin has {len(raw) - 1} bytes instead of"):
        read(made)
    path.unlink()
    with pytest.raises(FormatError, match="layer-000.bin is missing"):
        read(made)


def test_a_pack_of_another_checkpoint_is_refused(made):
    with pytest.raises(FormatError, match=r"manifest.json belongs to another.*0123.*beef.*remove"):
        read(made, checkpoint_hash="beef")


def test_other_layouts_are_refused(made):
    with pytest.raises(FormatError, match="packed as gate Q4_K tiles.*wanted gate Q4_K native"):
        read(made, shapes=made.native)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(version=99), "version 99"),
        (lambda m: m.update(format="zip"), "'zip'"),
        (lambda m: m["layers"].pop(), "must list 3 layers"),
        (lambda m: m.update(layers=None), "must list 3 layers"),
        (lambda m: m["layers"].__setitem__(0, None), "damaged in layer 0"),
        (lambda m: m["layers"].__setitem__(1, m["layers"][0]), "damaged in layer 1"),
        (lambda m: m["layers"].__setitem__(2, "?"), "damaged in layer 2"),
        (lambda m: m["layers"][0].pop("shape"), "damaged in layer 0"),
        (lambda m: m["layers"][0]["shape"].update(up_layout="x"), "damaged in layer 0"),
        (lambda m: m["layers"][0]["pieces"].append(7), "damaged in layer 0"),
        (lambda m: m["layers"][0]["pieces"].append("7"), "damaged in layer 0: 4 hashes for 3"),
        (lambda m: m["layers"][2].update(n_experts=6), "layer 2: packed as"),
        (lambda m: m["layers"][2]["shape"].update(up_offset=0), "layer 2: packed as"),
    ],
)
def test_damaged_manifests_are_refused(made, edit, message):
    path = made.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=f"manifest.json.*{message}.*remove"):
        read(made)
    path.write_text("{")
    with pytest.raises(FormatError, match=r"manifest.json is not valid JSON"):
        read(made)


def test_an_unfinished_pack_is_made_again(made):
    """The manifest is written last: without it the folder counts as empty."""
    (made.folder / "manifest.json").rename(made.folder / "manifest.json.partial")
    assert open_pack(made.folder, HASH, made.native) is None
    write_pack(made.folder, HASH, made.store)
    assert torch.equal(read(made)[1].layer(0).blobs, made.store.layer(0).blobs)


def test_folders_that_are_not_ours_are_left_alone(tmp_path, made):
    assert open_pack(tmp_path / "new", HASH, made.native) is None
    (tmp_path / "letters").mkdir()
    assert open_pack(tmp_path / "letters", HASH, made.native) is None
    (tmp_path / "letters" / "love.txt").write_text("x")
    with pytest.raises(InputError, match=r"letters: holds other things \(love.txt\)"):
        open_pack(tmp_path / "letters", HASH, made.native)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file: not a folder"):
        open_pack(tmp_path / "file", HASH, made.native)
    with pytest.raises(InputError, match="cannot write the pack"):
        write_pack(tmp_path / "file" / "below", HASH, made.store)


def test_a_full_disk_is_refused_before_loading(tmp_path, made, monkeypatch):
    usage = SimpleNamespace(free=made.store.n_bytes - 1)
    monkeypatch.setattr(packs.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=f"takes {made.store.n_bytes} bytes.*{usage.free} free"):
        require_room(tmp_path / "new" / "deep", made.shapes)
    usage.free += 1
    require_room(tmp_path / "new" / "deep", made.shapes)


def test_the_fingerprint_is_of_contents(tmp_path):
    """Another name and date: the same. Another byte in an expert, name or size: another."""

    def print_of(path):
        with open_checkpoint(path) as checkpoint:
            names = [n for n in checkpoint.tensors if "_exps" in n]
            assert names
            last = checkpoint.info(names[-1])
            return packs.fingerprint(checkpoint, names), last.offset + last.n_bytes - 1

    first, last_byte = print_of(FIXTURE)
    raw = bytearray(FIXTURE.read_bytes())
    copy = tmp_path / "other-name.gguf"
    copy.write_bytes(raw)
    assert print_of(copy)[0] == first
    raw[last_byte] ^= 1
    copy.write_bytes(raw)
    assert print_of(copy)[0] != first
    raw[last_byte] ^= 1
    copy.write_bytes(bytes(raw) + b"\0" * 32)
    assert print_of(copy)[0] != first
    at = raw.index(b"ffn_gate_exps"), raw.index(b"ffn_up_exps.")
    raw[at[0] : at[0] + 13], raw[at[1] : at[1] + 12] = b"ffn_gate_expz", b"ffn_up_expz."
    copy.write_bytes(raw)
    with open_checkpoint(copy) as checkpoint:
        assert packs.fingerprint(checkpoint, []) != first


def test_layouts_can_be_imposed():
    """Expectation: the shapes that were packed."""
    native = SOURCE.shapes()
    shapes = choose_layouts(native, "tiles", reads_tiles=True, fits=lambda s: True).shapes
    assert impose_layouts(native, [e and e[0].layouts for e in shapes]) == list(shapes)
