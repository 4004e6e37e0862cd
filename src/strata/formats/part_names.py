"""Names of multi-part checkpoints: ``<stem>-0000i-of-0000n.gguf`` or ``.safetensors``."""

from __future__ import annotations

import re
from pathlib import Path

from strata.core.errors import FormatError
from strata.formats.text import listed

_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)",
    re.DOTALL | re.ASCII,
)


def set_name(path: Path) -> str:
    """What the files of one set have in common: the name with the part number blanked."""
    match = _PART.fullmatch(path.name)
    if not match:
        return path.name
    return f"{match['stem']}-*-of-{match['count']}{match['suffix']}"


def part_paths(path: Path) -> list[Path]:
    """All parts of the set ``path`` belongs to by its name; FormatError lists missing ones."""
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise FormatError(f"{path}: the name says part {number} of {count}; restore its name")
    names = [
        f"{match['stem']}-{i + 1:05d}-of-{match['count']}{match['suffix']}" for i in range(count)
    ]
    return all_present(path.parent, names, set_name(path))


def all_present(folder: Path, names: list[str], whole: str) -> list[Path]:
    """Paths of ``names`` in ``folder``; FormatError lists all of ``whole`` that are missing."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FormatError(
            f"{len(missing)} of the {len(names)} files of {whole} are missing in {folder}: "
            f"{listed(missing)}; download them"
        )
    return [folder / name for name in names]
