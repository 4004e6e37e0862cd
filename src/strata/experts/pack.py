"""A pack: the experts as they lie in RAM, kept on disk so that no later start re-codes them.

A folder with one file per layer (blobs end to end, as in ``ExpertStore``) and ``manifest.json``,
which is written last: a folder without one was never finished and is made again. The manifest says
which checkpoint the pack belongs to, how the blobs are laid out, and the hash of every piece; all
of it is checked before a byte is used. Knows no places and no kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from strata.core.errors import FormatError, InputError
from strata.experts.layouts import Entry
from strata.experts.loader import empty_layers
from strata.experts.pieces import Piece, cut, run_pieces
from strata.experts.store import ExpertLayer, ExpertStore, Progress, stride_of
from strata.formats.checkpoint import Checkpoint
from strata.formats.json_file import read_json_object
from strata.kernels.expert_rows import Layouts

MANIFEST = "manifest.json"
FORMAT = "strata expert pack"
VERSION = 1
_SAMPLES, _SAMPLE_BYTES = 512, 4096


@dataclass(frozen=True)
class PackedLayer:
    """A layer by the manifest. shape: fields of its ExpertShape. pieces: their hashes in order."""

    n_experts: int
    shape: dict[str, Any]
    layouts: Layouts
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Pack:
    """A finished pack that belongs to the checkpoint; None for layers without routed experts."""

    folder: Path
    layers: tuple[PackedLayer | None, ...]


def fingerprint(checkpoint: Checkpoint, expert_names: Sequence[str]) -> str:
    """What a pack remembers of its checkpoint, whatever its name, place and dates.

    A hash of the files' sizes, of the table of tensors (names, types, shapes, places) and of
    samples of the experts' bytes.
    """
    h = hashlib.blake2b(digest_size=16)
    paths = {path: i for i, path in enumerate(checkpoint.paths)}
    h.update(repr([path.stat().st_size for path in checkpoint.paths]).encode())
    for info in checkpoint.tensors.values():
        place = (info.name, info.type.name, info.shape, paths[info.path], info.offset)
        h.update(repr(place).encode())
    names = [name for name in expert_names if checkpoint.info(name).n_bytes]
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        raw = checkpoint.raw(name)
        for start in (0, len(raw) // 2, max(0, len(raw) - _SAMPLE_BYTES)):
            h.update(raw[start : start + _SAMPLE_BYTES].tobytes())
    return h.hexdigest()


def open_pack(folder: Path, checkpoint_hash: str, native: Sequence[Entry]) -> Pack | None:
    """The pack in a folder; None when the folder is new, empty or holds an unfinished pack.

    native: the checkpoint's layers. FormatError when the pack is damaged or belongs to another
    checkpoint or version, InputError when the folder holds something else.
    """
    path = folder / MANIFEST
    if not path.exists():
        _require_ours(folder)
        return None
    manifest = read_json_object(path)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise FormatError(
            f"{path} is {manifest.get('format')!r} version {manifest.get('version')!r}, this "
            f"program reads {FORMAT!r} version {VERSION}; {_REMEDY}"
        )
    if manifest.get("checkpoint") != checkpoint_hash:
        raise FormatError(
            f"{path} belongs to another checkpoint (its fingerprint is "
            f"{manifest.get('checkpoint')}, this one's is {checkpoint_hash}); {_REMEDY}"
        )
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) != len(native):
        raise FormatError(f"{path} is damaged: it must list {len(native)} layers; {_REMEDY}")
    packed = [None if layer is None else _packed_layer(layer) for layer in layers]
    for index, entry in enumerate(native):
        if (layers[index] is None) != (entry is None) or (packed[index] is None) != (entry is None):
            raise FormatError(f"{path} is damaged in layer {index}; {_REMEDY}")
    return Pack(folder, tuple(packed))


def check_pack(pack: Pack, shapes: Sequence[Entry]) -> None:
    """FormatError unless the pack holds exactly these shapes, in files of the right size."""
    manifest, n_pieces = pack.folder / MANIFEST, Counter(piece.layer for piece in cut(shapes))
    for index, (layer, entry) in enumerate(zip(pack.layers, shapes, strict=True)):
        if layer is None or entry is None:
            continue
        shape, n_experts = entry
        if layer.shape != asdict(shape) or layer.n_experts != n_experts:
            raise FormatError(
                f"{manifest}, layer {index}: packed as "
                f"{_layout_words(layer.shape)}, wanted {_layout_words(asdict(shape))}; ask for "
                f"the packed layouts with --expert-layout auto, or {_REMEDY}"
            )
        path, size = pack.folder / _file_name(index), stride_of(shape) * n_experts
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise FormatError(f"{path} {what}; {_REMEDY}")
        if len(layer.pieces) != n_pieces[index]:
            raise FormatError(
                f"{manifest} is damaged in layer {index}: {len(layer.pieces)} hashes for "
                f"{n_pieces[index]} pieces; {_REMEDY}"
            )


def load_pack(
    pack: Pack, shapes: Sequence[Entry], progress: Progress | None = None, *, workers: int = 1
) -> ExpertStore:
    """Every expert into RAM from a pack that ``check_pack`` accepted; FormatError for damage."""
    layers = empty_layers(shapes)
    pieces = cut(shapes)
    number = _piece_numbers(pieces)

    def read(piece: Piece) -> None:
        path = pack.folder / _file_name(piece.layer)
        group = layers[piece.layer]
        memory = memoryview(_bytes_of(group, piece))
        try:
            with open(path, "rb", buffering=0) as stream:
                stream.seek(piece.first * group.stride_bytes)
                done = 0
                while done < len(memory):
                    n = stream.readinto(memory[done:])
                    if not n:
                        break
                    done += n
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        layer = pack.layers[piece.layer]
        assert layer is not None
        if _digest(memory) != layer.pieces[number[piece]]:
            raise FormatError(
                f"{path} is damaged: experts {piece.first} to {piece.stop - 1} do not match their "
                f"hash; {_REMEDY}"
            )

    run_pieces(pieces, read, workers, "experts", progress)
    return ExpertStore([layers.get(index) for index in range(len(shapes))])


def require_room(folder: Path, shapes: Sequence[Entry]) -> None:
    """InputError when the disk under the folder has no room for a pack."""
    need = sum(stride_of(entry[0]) * entry[1] for entry in shapes if entry is not None)
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise InputError(
            f"--pack {folder}: the pack takes {need} bytes, the disk has {free} free; "
            f"choose another folder or leave --pack out"
        )


def write_pack(
    folder: Path,
    checkpoint_hash: str,
    store: ExpertStore,
    progress: Progress | None = None,
    *,
    workers: int = 1,
) -> None:
    """Write all experts; the manifest appears last, in one step. InputError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, checkpoint_hash, store, progress, workers)
    except OSError as error:
        name = error.filename or folder
        raise InputError(f"cannot write the pack {name}: {error.strerror or error}") from None


def _write(
    folder: Path,
    checkpoint_hash: str,
    store: ExpertStore,
    progress: Progress | None,
    workers: int,
) -> None:
    shapes = [None if g is None else (g.shape, g.n_experts) for g in store.layers]
    pieces = cut(shapes)
    digests: dict[Piece, str] = {}
    files: dict[int, int] = {}
    try:
        for index, group in enumerate(store.layers):
            if group is not None:
                path = folder / _file_name(index)
                files[index] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

        def write(piece: Piece) -> None:
            group = store.layer(piece.layer)
            assert isinstance(group, ExpertLayer), "a pack is made of blobs in RAM"
            memory, offset = memoryview(_bytes_of(group, piece)), piece.first * group.stride_bytes
            done = 0
            while done < len(memory):
                done += os.pwrite(files[piece.layer], memory[done:], offset + done)
            digests[piece] = _digest(memory)

        run_pieces(pieces, write, workers, "pack", progress)
        for descriptor in files.values():
            os.fsync(descriptor)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    layers: list[dict[str, Any] | None] = [
        None if entry is None else {"n_experts": entry[1], "shape": asdict(entry[0]), "pieces": []}
        for entry in shapes
    ]
    for piece in pieces:
        layer = layers[piece.layer]
        assert layer is not None
        layer["pieces"].append(digests[piece])
    manifest = {"format": FORMAT, "version": VERSION, "checkpoint": checkpoint_hash}
    partial = folder / (MANIFEST + ".partial")
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump({**manifest, "layers": layers}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, folder / MANIFEST)


_REMEDY = "remove that folder to have it made again, or name another with --pack"


def _file_name(layer: int) -> str:
    return f"layer-{layer:03}.bin"


def _require_ours(folder: Path) -> None:
    """A folder without manifest may hold an unfinished pack, and nothing else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"--pack {folder}: not a folder; name a new or empty one")
    strange = [
        p.name
        for p in sorted(folder.iterdir())
        if not (p.name.startswith("layer-") and p.suffix == ".bin")
        and p.name != MANIFEST + ".partial"
    ]
    if strange:
        raise InputError(
            f"--pack {folder}: holds other things ({', '.join(strange[:3])}); "
            f"name a new or empty folder"
        )


def _packed_layer(layer: object) -> PackedLayer | None:
    """A layer of the manifest; None when a field that is used before any comparison is wrong."""
    if not isinstance(layer, dict):
        return None
    shape, pieces, n_experts = layer.get("shape"), layer.get("pieces"), layer.get("n_experts")
    if not isinstance(shape, dict) or not isinstance(pieces, list):
        return None
    layouts = tuple(shape.get(f"{proj}_layout") for proj in ("gate", "up", "down"))
    known = all(how in ("native", "tiles") for how in layouts)
    if not known or not isinstance(n_experts, int) or not all(isinstance(p, str) for p in pieces):
        return None
    return PackedLayer(n_experts, shape, cast(Layouts, layouts), tuple(pieces))


def _layout_words(shape: dict[str, Any]) -> str:
    return ", ".join(
        f"{proj} {shape.get(proj + '_type')} {shape.get(proj + '_layout')}"
        for proj in ("gate", "up", "down")
    )


def _bytes_of(group: ExpertLayer, piece: Piece) -> Any:
    """The piece's memory as one run of bytes."""
    return group.blobs[piece.first : piece.stop].reshape(-1).numpy()


def _piece_numbers(pieces: Sequence[Piece]) -> dict[Piece, int]:
    """The place of every piece among those of its layer."""
    first = {piece.layer: i for i, piece in reversed(list(enumerate(pieces)))}
    return {piece: i - first[piece.layer] for i, piece in enumerate(pieces)}


def _digest(memory: memoryview) -> str:
    return hashlib.blake2b(memory, digest_size=16).hexdigest()
