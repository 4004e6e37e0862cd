"""JSON beside and inside weight files, read with errors that name the file. Knows no keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strata.core.errors import FormatError, InputError
from strata.formats.text import quoted

# The index of a checkpoint with 100,000 tensors has about 10 MB.
_MAX_BYTES = 1 << 28


def read_json_object(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in ``path``; FormatError when it is none, InputError when unreadable.

    unique: a name that occurs twice in one object is an error too.
    """
    try:
        if not path.is_file():
            raise FormatError(f"{path} is not a regular file")
        if path.stat().st_size > _MAX_BYTES:
            raise FormatError(
                f"{path} has {path.stat().st_size} bytes; that is no JSON description"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    return parse_json_object(raw, str(path), unique=unique)


def parse_json_object(raw: bytes, what: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in ``raw`` (UTF-8); FormatError, naming ``what``, for anything else."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_names if unique else None)
    except _DuplicateNameError as error:
        raise FormatError(f"{what}: {error}; it is damaged, download it again") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} must hold a JSON object, it holds a {type(value).__name__}")
    return value


class _DuplicateNameError(Exception):
    """A name occurs twice in one JSON object."""


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise _DuplicateNameError(
                f"{quoted(name)} occurs twice, {_place(seen[name])} and {_place(value)}"
            )
        seen[name] = value
    return result


def _place(entry: Any) -> str:
    """Which of two equal names it was: the data it points to, or its value."""
    if isinstance(entry, dict) and "data_offsets" in entry:
        return f"at data offsets {str(entry['data_offsets'])[:60]}"
    return f"as {quoted(str(entry), 60)}"
