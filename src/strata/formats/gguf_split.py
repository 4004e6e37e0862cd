"""A GGUF checkpoint as one or several files: finds all parts, checks that they fit together.

A part is named ``<stem>-0000i-of-0000n.gguf`` and carries the keys split.no (from 0), split.count
and, usually, split.tensors.count (over all parts). Which part holds the model's keys and how
tensors are spread is free: a first part of metadata only, or a big table alone in a part, are the
same to us. Invariant: the result does not depend on the part it was opened from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from strata.core.errors import FormatError
from strata.formats.gguf import GgufFile, MetadataValue, read_gguf
from strata.formats.mapped import MappedFile
from strata.formats.part_names import part_paths, set_name
from strata.formats.tensor_info import TensorInfo
from strata.formats.text import quoted

ARCHITECTURE_KEY = "general.architecture"


@dataclass(frozen=True)
class GgufSet:
    """All parts of one checkpoint, open.

    metadata, metadata_types: those of the part that has the model's keys. tensors: parts in order,
    each in its own table's order.
    """

    parts: tuple[GgufFile, ...]
    metadata: Mapping[str, MetadataValue]
    metadata_types: Mapping[str, str]
    tensors: dict[str, TensorInfo]


def open_gguf_set(path: Path) -> GgufSet:
    """Open the set that ``path`` belongs to, its parts checked against each other (FormatError)."""
    paths = part_paths(path)
    with ExitStack() as undo:
        parts = []
        for part_path in paths:
            file = MappedFile(part_path)
            undo.callback(file.close)
            parts.append(read_gguf(file))
        _check_split_keys(parts)
        model = _model_part(parts)
        tensors = _merge(parts)
        _check_tensor_count(parts, len(tensors))
        undo.pop_all()
    return GgufSet(tuple(parts), model.metadata, model.metadata_types, tensors)


def _int_key(part: GgufFile, key: str) -> int | None:
    value = part.metadata.get(key)
    if value is None:
        return None
    if type(value) is not int:
        raise FormatError(f"{part.path}: {key} must be an integer, it is {_kind(part, key)}")
    return value


def _kind(part: GgufFile, key: str) -> str:
    return part.metadata_types.get(key, "absent")


def _check_split_keys(parts: list[GgufFile]) -> None:
    n_parts = len(parts)
    for i, part in enumerate(parts):
        count, number = _int_key(part, "split.count"), _int_key(part, "split.no")
        if n_parts == 1:
            if count is not None and count > 1:
                raise FormatError(
                    f"{part.path} says it is part {(number or 0) + 1} of {count}, but its name "
                    f"does not say so; name all parts <name>-00001-of-{count:05d}.gguf and so on"
                )
        elif count is None or number is None:
            raise FormatError(
                f"{part.path} is named as part {i + 1} of {n_parts} but has no split.count and "
                "split.no; it is not a part of this set"
            )
        elif (number, count) != (i, n_parts):
            raise FormatError(
                f"{part.path} is named as part {i + 1} of {n_parts} but says it is part "
                f"{number + 1} of {count}; a part of another set lies under this name, download it "
                "again"
            )


def _check_tensor_count(parts: list[GgufFile], n_tensors: int) -> None:
    declared = [(part, _int_key(part, "split.tensors.count")) for part in parts]
    known = [(part, n) for part, n in declared if n is not None]
    if len(parts) == 1 or not known:
        return
    first, expected = known[0]
    for part, n in known:
        if n != expected:
            raise FormatError(
                f"{part.path} belongs to a set of {n} tensors but {first.path} to one of "
                f"{expected}; the parts come from different sets, download them again"
            )
    if n_tensors != expected:
        has = ", ".join(f"{part.path.name} has {len(part.tensors)}" for part in parts)
        raise FormatError(
            f"the parts of {set_name(first.path)} in {first.path.parent} should hold {expected} "
            f"tensors but hold {n_tensors} ({has}); a part comes from another set, download it "
            "again"
        )


def _model_part(parts: list[GgufFile]) -> GgufFile:
    """The first part with the model's keys (the first part of all when none has them)."""
    having = [part for part in parts if ARCHITECTURE_KEY in part.metadata]
    for part in having[1:]:
        ours, theirs = having[0].metadata[ARCHITECTURE_KEY], part.metadata[ARCHITECTURE_KEY]
        if str(ours) != str(theirs):
            raise FormatError(
                f"{having[0].path} is a {quoted(str(ours))} model but {part.path} a "
                f"{quoted(str(theirs))} model; the parts come from different sets"
            )
    return having[0] if having else parts[0]


def _merge(parts: list[GgufFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.tensors:
            other = tensors.get(tensor.name)
            if other is not None:
                raise FormatError(
                    f"tensor {quoted(tensor.name)} is in two parts, {other.path} and {part.path}; "
                    "the parts do not belong together, download them again"
                )
            tensors[tensor.name] = tensor
    return tensors
