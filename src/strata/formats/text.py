"""Names out of files, made safe for one line of an error message or a listing. Knows no formats."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NAME_CHARS = 120
_MAX_LISTED = 1000


def quoted(name: str, limit: int = _MAX_NAME_CHARS) -> str:
    """``name`` quoted on one line: control characters and invalid bytes escaped, long ones cut."""
    if len(name) > limit:
        return f"{name[:limit]!r}... ({len(name)} characters)"
    return repr(name)


def listed(items: Iterable[str]) -> str:
    """All items, comma-separated; only a hostile number of them (over 1000) is cut."""
    every = list(items)
    shown = ", ".join(every[:_MAX_LISTED])
    return shown if len(every) <= _MAX_LISTED else f"{shown} and {len(every) - _MAX_LISTED} more"


def counted(n: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
