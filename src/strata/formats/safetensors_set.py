"""A safetensors checkpoint: one file, the files of an index, or parts known by their names.

Knows no models. Invariant: the result does not depend on the part it was opened from, and nothing
is opened unless every file of the set is there.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from strata.core.errors import FormatError
from strata.formats.json_file import read_json_object
from strata.formats.mapped import MappedFile
from strata.formats.part_names import all_present, part_paths
from strata.formats.safetensors import SafetensorsFile, confirm, read_safetensors
from strata.formats.tensor_info import TensorInfo
from strata.formats.text import listed, quoted

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_FILE_NAME = 255


@dataclass(frozen=True)
class SafetensorsSet:
    """All files of one checkpoint, open; tensors by file, then by offset."""

    parts: tuple[SafetensorsFile, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_index(path: Path) -> dict[str, str]:
    """The weight map {tensor name: file name} of an index file; FormatError when it is damaged."""
    weight_map = read_json_object(path, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path} has no weight_map of tensor names to files; download it again")
    for tensor, name in weight_map.items():
        if not _is_file_name(name):
            raise FormatError(
                f"{path}: tensor {quoted(tensor)} is said to be in {quoted(str(name))}, which is "
                "no file name; the index is damaged"
            )
    return weight_map


def _is_file_name(name: object) -> bool:
    """A plain name in the index's own folder: an index must not reach other folders."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name) <= _MAX_FILE_NAME
        and re.search(r"[/\\\0]", name) is None
    )


def open_safetensors_set(path: Path, *, check: bool = True) -> SafetensorsSet:
    """Open a set from its index file (``*.safetensors.index.json``) or from one of its files.

    check: also let the ``safetensors`` package open every file; off for listings, where dtypes that
    the package does not know are shown. Raises FormatError, naming files and tensors.
    """
    weight_map = read_index(path) if path.name.endswith(INDEX_SUFFIX) else None
    if weight_map is None:
        paths = part_paths(path)
    else:
        paths = all_present(path.parent, sorted(set(weight_map.values())), path.name)
    with ExitStack() as undo:
        parts = []
        for part_path in paths:
            file = MappedFile(part_path)
            undo.callback(file.close)
            parts.append(read_safetensors(file))
            if check:
                confirm(parts[-1])
        tensors = _merge(parts)
        if weight_map is not None:
            _check_index(path, weight_map, tensors)
        undo.pop_all()
    metadata: dict[str, str] = {}
    for part in parts:
        metadata.update(part.metadata)
    return SafetensorsSet(tuple(parts), tensors, metadata)


def _merge(parts: list[SafetensorsFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.tensors:
            other = tensors.get(tensor.name)
            if other is not None:
                raise FormatError(
                    f"tensor {quoted(tensor.name)} is in two files, {other.path} and "
                    f"{tensor.path}; the files do not belong together, download them again"
                )
            tensors[tensor.name] = tensor
    return tensors


def _check_index(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    astray = [
        f"{quoted(name)} (listed in {file})"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].path.name != file
    ]
    if astray:
        raise FormatError(
            f"{path} lists {len(astray)} tensors that are not in the file it names: "
            f"{listed(astray)}; a file comes from another checkpoint or is an older version, "
            "download the set again"
        )
