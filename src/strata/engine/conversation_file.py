"""Conversations in files: written whole, and refused for any damage before the engine sees a byte.

A file is a magic number, the length of a JSON header, the header, and the tensors' bytes one after
the other. The header says whose state it is (``Identity``); what the tensors must look like is
worked out from the engine's own state and never taken from the file, so a file can lie about
nothing but its contents, and those are hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from strata.core.errors import FormatError, SettingError
from strata.core.log import LOG
from strata.memory.state import Image, SequenceState, Snapshot, StateSpec

MAGIC = b"STRATACONV\x00\x01"
SUFFIX = ".conversation"
MAX_HEADER_BYTES = 64 << 20
MAX_FILES = 64
"""Conversations of one model and settings kept in a folder."""
_LENGTH = struct.Struct("<Q")
Key = tuple[int, str]
Specs = Mapping[Key, StateSpec]


@dataclass(frozen=True)
class Kept:
    """A sequence that is not in the engine. image: its state, or None while it is in a file."""

    tokens: tuple[int, ...]
    image: Image | None = field(repr=False)
    checkpoints: tuple[Snapshot, ...] = field(default=(), repr=False)
    exact_tokens: int = 0
    path: Path | None = None

    @property
    def n_bytes(self) -> int:
        """Main memory it takes."""
        parts: list[Snapshot] = [*self.checkpoints, *([self.image] if self.image else [])]
        return sum(part.n_bytes for part in parts)


Identity = Mapping[str, str]
"""Everything that decides what state means: model, tokenizer, settings, version. Compared whole."""


def tensor_table(specs: Specs, n_tokens: int, *, whole: bool) -> list[tuple[Key, tuple[int, ...]]]:
    """Which tensors, and in which shapes, an image (whole) or a checkpoint of n tokens has."""
    table: list[tuple[Key, tuple[int, ...]]] = []
    for key in sorted(specs):
        spec = specs[key]
        if spec.kind == "recurrent":
            table.append((key, spec.shape))
        elif spec.kind == "ring":
            table.append((key, (spec.ring_entries, *spec.shape)))
        elif whole:
            table.append((key, (spec.n_entries(n_tokens), *spec.shape)))
    return table


def write_kept(path: Path, kept: Kept, specs: Specs, identity: Identity) -> None:
    """Write a sequence; the file is there whole or not at all, and readable by its owner only."""
    assert kept.image is not None
    body = hashlib.blake2b(digest_size=32)
    parts: list[memoryview] = []
    for snapshot, whole in [(kept.image, True), *((s, False) for s in kept.checkpoints)]:
        for key, _ in tensor_table(specs, len(snapshot.tokens), whole=whole):
            raw = snapshot.tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().data
            body.update(raw)
            parts.append(raw)
    header = {
        "identity": dict(identity),
        "tokens": list(kept.tokens),
        "checkpoints": [len(s.tokens) for s in kept.checkpoints],
        "exact_tokens": kept.exact_tokens,
        "bytes": sum(part.nbytes for part in parts),
        "hash": body.hexdigest(),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    seal = hashlib.blake2b(text, digest_size=32).digest()
    temporary = path.with_suffix(".part")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.writelines([MAGIC, _LENGTH.pack(len(text)), seal, text, *parts])
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_header(path: Path, specs: Specs, identity: Identity, context_tokens: int) -> Kept:
    """The sequence of a file, without its state. FormatError for another model or settings, and
    for damage anywhere but in the tensors."""
    with open(path, "rb") as file:
        header, start = _header(path, file.read(len(MAGIC) + _LENGTH.size + 32), file)
    _require(path, header.get("identity") == dict(identity), _difference(header, identity))
    tokens, places = header.get("tokens"), header.get("checkpoints")
    exact, n_bytes = header.get("exact_tokens"), header.get("bytes")
    numbers = [*_whole_numbers(path, tokens), *_whole_numbers(path, places), exact, n_bytes]
    _require(path, all(type(x) is int and x >= 0 for x in numbers), "has values that are no counts")
    assert isinstance(tokens, list) and isinstance(places, list)
    _require(path, 0 < len(tokens) <= context_tokens, f"has {len(tokens)} tokens")
    rising = all(a < b for a, b in zip([0, *places], [*places, len(tokens) + 1], strict=True))
    _require(path, rising, "has checkpoints out of order")
    need = _n_bytes(specs, len(tokens), places)
    size = path.stat().st_size
    _require(path, header["bytes"] == need, f"holds {header['bytes']} bytes of state, not {need}")
    _require(path, size == start + need, f"has {size} bytes where {start + need} are due")
    checkpoints = tuple(Snapshot(tuple(tokens[:n]), {}) for n in places)
    return Kept(tuple(tokens), None, checkpoints, min(header["exact_tokens"], len(tokens)), path)


def read_kept(path: Path, specs: Specs, identity: Identity, context_tokens: int) -> Kept:
    """The sequence of a file with its state, as new tensors. FormatError for any damage."""
    kept = read_header(path, specs, identity, context_tokens)
    with open(path, "rb") as file:
        header, _ = _header(path, file.read(len(MAGIC) + _LENGTH.size + 32), file)
        raw = bytearray(file.read())
    found = hashlib.blake2b(raw, digest_size=32).hexdigest()
    _require(path, found == header["hash"], "is damaged: its contents do not match their hash")
    at = 0

    def take(n_tokens: int, *, whole: bool) -> dict[Key, torch.Tensor]:
        nonlocal at
        tensors: dict[Key, torch.Tensor] = {}
        for key, shape in tensor_table(specs, n_tokens, whole=whole):
            flat = torch.zeros(shape, dtype=specs[key].dtype)
            target = flat.reshape(-1).view(torch.uint8)
            target.copy_(torch.frombuffer(raw, dtype=torch.uint8, count=len(target), offset=at))
            at += len(target)
            tensors[key] = flat
        return tensors

    image = Image(kept.tokens, take(len(kept.tokens), whole=True))
    checkpoints = tuple(
        Snapshot(s.tokens, take(len(s.tokens), whole=False)) for s in kept.checkpoints
    )
    return Kept(kept.tokens, image, checkpoints, kept.exact_tokens, path)


class ConversationFolder:
    """The conversations of one model and settings in a folder; those of others stay untouched."""

    def __init__(self, folder: Path, state: SequenceState, identity: Identity) -> None:
        self._folder = folder
        self._state = state
        self._identity = identity
        self._require_usable()
        self._stored: dict[Path, Kept] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            with self._refusing(path):
                self._stored[path] = read_header(path, state.specs, identity, state.context_tokens)
        self._ours = {path: kept.tokens for path, kept in self._stored.items()}

    def _require_usable(self) -> None:
        """SettingError, at the start and not when there is something to keep."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise SettingError(
                f"--park-dir {self._folder}: conversations cannot be kept there "
                f"({error.strerror or error}); name a folder that can be written"
            ) from None

    def stored(self) -> Sequence[Kept]:
        """Those that may be loaded."""
        return list(self._stored.values())

    def load(self, kept: Kept) -> Kept | None:
        """With its state, and no longer offered; None when the file is not what it was."""
        assert kept.path is not None
        self._stored.pop(kept.path, None)
        with self._refusing(kept.path):
            loaded = read_kept(
                kept.path, self._state.specs, self._identity, self._state.context_tokens
            )
            if loaded.tokens == kept.tokens:
                return loaded
        return None

    def save(self, sequences: Sequence[Kept]) -> int:
        """Write sequences, each under a name made of its tokens; files of beginnings of them, and
        the oldest above MAX_FILES, are removed. The number written."""
        n = 0
        for kept in sequences:
            path = self._folder / f"{_name(kept.tokens, self._identity)}{SUFFIX}"
            try:
                write_kept(path, kept, self._state.specs, self._identity)
            except OSError as error:
                LOG.warning("conversation not saved: %s: %s", path, error.strerror or error)
                continue
            n += 1
            shorter = [
                old
                for old, tokens in self._ours.items()
                if old != path and tokens == kept.tokens[: len(tokens)]
            ]
            self._ours[path] = kept.tokens
            self._remove(shorter)
        by_age = sorted(self._ours, key=lambda path: path.stat().st_mtime)
        self._remove(by_age[: max(0, len(by_age) - MAX_FILES)])
        return n

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._ours.pop(path)
            self._stored.pop(path, None)
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _refusing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (FormatError, OSError) as error:
            LOG.warning("conversation not restored: %s", error)


def _header(path: Path, head: bytes, file: Any) -> tuple[dict[str, Any], int]:
    """(header, where the tensors begin), sealed and of a believable size."""
    start = len(MAGIC) + _LENGTH.size
    _require(path, len(head) == start + 32 and head.startswith(MAGIC), "is no conversation file")
    (length,) = _LENGTH.unpack_from(head, len(MAGIC))
    left = path.stat().st_size - len(head)
    _require(path, 0 < length <= min(left, MAX_HEADER_BYTES), "is cut short in its header")
    text = file.read(length)
    seal = hashlib.blake2b(text, digest_size=32).digest()
    _require(path, seal == head[start:], "is damaged in its header")
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    _require(path, isinstance(header, dict), "has a header that is no object")
    return header, len(head) + length


def _n_bytes(specs: Specs, n_tokens: int, places: Sequence[int]) -> int:
    total = 0
    for n, whole in [(n_tokens, True), *((n, False) for n in places)]:
        for key, shape in tensor_table(specs, n, whole=whole):
            total += torch.Size(shape).numel() * specs[key].dtype.itemsize
    return total


def _whole_numbers(path: Path, values: Any) -> list[Any]:
    _require(path, isinstance(values, list), "has no list where one is due")
    return list(values)


def _difference(header: Mapping[str, Any], identity: Identity) -> str:
    theirs = header.get("identity")
    if not isinstance(theirs, dict):
        return "does not say whose it is"
    names = [name for name in identity if theirs.get(name) != identity[name]]
    return f"was written with another {', '.join(names) or 'set of settings'}"


def _require(path: Path, holds: bool, what: str) -> None:
    if not holds:
        raise FormatError(f"{path} {what}; it is left alone")


def _name(tokens: Sequence[int], identity: Identity) -> str:
    text = json.dumps([sorted(identity.items()), list(tokens)]).encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()
