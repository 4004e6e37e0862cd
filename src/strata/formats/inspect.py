"""What is inside a checkpoint, for people: a structured description and its text lines.

Never trips over what cannot be loaded: unknown and retired types are listed with their numbers.
Text out of the file is escaped, so that a file cannot write to the terminal what it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.formats.checkpoint import Checkpoint, open_checkpoint
from strata.formats.gguf import MetadataValue
from strata.formats.string_array import StringArray
from strata.formats.tensor_info import TensorInfo
from strata.formats.text import counted, quoted

_SHOWN_ITEMS = 6
_SHOWN_CHARS = 80
_SHOWN_SETTINGS_CHARS = 160
_MAX_PLAIN_CHARS = 120


@dataclass(frozen=True)
class MetadataEntry:
    """One metadata key: what it is stored as and its value on one line, long values abbreviated."""

    key: str
    type: str
    value: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. type: name, or number and reason. n_bytes: None for a type of unknown size."""

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int | None
    file: str
    offset: int
    readable: bool


@dataclass(frozen=True)
class TypeTotal:
    """All tensors of one type; n_bytes None when their size is unknown."""

    type: str
    n_tensors: int
    n_elements: int
    n_bytes: int | None


@dataclass(frozen=True)
class Description:
    """A checkpoint described. files: name and size in bytes. config: config.json's top level."""

    path: Path
    format: str
    files: tuple[tuple[str, int], ...]
    metadata: tuple[MetadataEntry, ...]
    config: tuple[MetadataEntry, ...]
    tensors: tuple[TensorEntry, ...]
    totals: tuple[TypeTotal, ...]


def describe(path: str | Path) -> Description:
    """Describe the checkpoint at ``path``; raises what ``open_checkpoint`` raises for damage."""
    with open_checkpoint(path, for_inspection=True) as checkpoint:
        return Description(
            path=Path(path),
            format=checkpoint.format,
            files=tuple((file.name, file.stat().st_size) for file in checkpoint.paths),
            metadata=_metadata(checkpoint),
            config=tuple(
                MetadataEntry(key, type(value).__name__, _setting(value))
                for key, value in checkpoint.config.items()
            ),
            tensors=tuple(_tensor(info) for info in checkpoint.tensors.values()),
            totals=_totals(checkpoint),
        )


def render(description: Description, *, tensors: bool = True) -> list[str]:
    """The description as text lines; ``tensors=False`` leaves the list of tensors out."""
    lines = [f"{description.path}: {description.format}, {len(description.tensors)} tensors"]
    lines += [f"  {_clean(name)}  {_size(size)}" for name, size in description.files]
    for title, entries in (("metadata", description.metadata), ("config.json", description.config)):
        if entries:
            lines += ["", f"{title} ({counted(len(entries), 'key')})"]
            width = max(len(_clean(entry.key)) for entry in entries)
            lines += [f"  {_clean(e.key):{width}}  {e.type}  {e.value}" for e in entries]
    if tensors and description.tensors:
        lines += ["", *_tensor_lines(description)]
    lines += ["", "tensors by type"]
    for total in description.totals:
        size = "size unknown" if total.n_bytes is None else _size(total.n_bytes)
        lines.append(
            f"  {total.type}: {counted(total.n_tensors, 'tensor')}, "
            f"{counted(total.n_elements, 'number')}, {size}"
        )
    odd = [tensor for tensor in description.tensors if not tensor.readable]
    if odd:
        lines += [
            "",
            f"cannot be loaded: {counted(len(odd), 'tensor')} of a type without a decoder",
        ]
    return lines


def _metadata(checkpoint: Checkpoint) -> tuple[MetadataEntry, ...]:
    types = checkpoint.metadata_types
    return tuple(
        MetadataEntry(key, types[key], _value(value)) for key, value in checkpoint.metadata.items()
    )


def _value(value: MetadataValue) -> str:
    if isinstance(value, str):
        return quoted(value, _SHOWN_CHARS)
    if isinstance(value, StringArray):
        return _array([quoted(text, 24) for text in value[:_SHOWN_ITEMS]], len(value))
    if isinstance(value, np.ndarray):
        return _array([_number(item) for item in value[:_SHOWN_ITEMS].tolist()], len(value))
    if isinstance(value, list):
        return _array([_value(item) for item in value[:_SHOWN_ITEMS]], len(value))
    return _number(value)


def _setting(value: Any) -> str:
    """A value of a JSON file; Python's notation of lists and objects escapes what is in them."""
    if isinstance(value, str):
        return quoted(value, _SHOWN_SETTINGS_CHARS)
    text = str(value)
    return text if len(text) <= _SHOWN_SETTINGS_CHARS else text[:_SHOWN_SETTINGS_CHARS] + "..."


def _array(shown: list[str], count: int) -> str:
    more = ", ..." if count > len(shown) else ""
    return f"[{', '.join(shown)}{more}] ({counted(count, 'item')})"


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _clean(text: str) -> str:
    """Text from a file without quotes, escaped where it is not printable."""
    return text if text.isprintable() and len(text) <= _MAX_PLAIN_CHARS else quoted(text)


def _tensor(info: TensorInfo) -> TensorEntry:
    sized = info.type.block_bytes > 0 or info.n_bytes > 0
    return TensorEntry(
        info.name,
        info.type.name,
        info.shape,
        info.n_bytes if sized else None,
        info.path.name,
        info.offset,
        info.readable,
    )


def _totals(checkpoint: Checkpoint) -> tuple[TypeTotal, ...]:
    groups: dict[str, list[TensorEntry]] = {}
    elements: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        groups.setdefault(info.type.name, []).append(_tensor(info))
        elements[info.type.name] = elements.get(info.type.name, 0) + info.n_elements
    totals = []
    for name, entries in groups.items():
        sizes = [entry.n_bytes for entry in entries if entry.n_bytes is not None]
        size = sum(sizes) if len(sizes) == len(entries) else None
        totals.append(TypeTotal(name, len(entries), elements[name], size))
    return tuple(sorted(totals, key=lambda total: -(total.n_bytes or 0)))


def _tensor_lines(description: Description) -> list[str]:
    """One line a tensor in columns; the file is named when there are several."""
    several = len(description.files) > 1
    rows = [("tensor", "type", "shape", "bytes", "offset", "file" if several else "")]
    for t in description.tensors:
        n_bytes = "?" if t.n_bytes is None else str(t.n_bytes)
        file = _clean(t.file) if several else ""
        rows.append((_clean(t.name), t.type, str(list(t.shape)), n_bytes, str(t.offset), file))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        f"  {name:{widths[0]}}  {kind:{widths[1]}}  {shape:{widths[2]}}  {n_bytes:>{widths[3]}}  "
        f"{offset:>{widths[4]}}  {file}".rstrip()
        for name, kind, shape, n_bytes, offset, file in rows
    ]


def _size(n_bytes: int) -> str:
    """Bytes, with MiB or GiB when there are many."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit} ({n_bytes} bytes)"
    return f"{n_bytes} bytes"
