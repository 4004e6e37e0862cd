"""Sizes of this machine's caches: what a measurement of memory must outgrow."""

from __future__ import annotations

from pathlib import Path


def cache_bytes(root: Path | None = None) -> int:
    """Bytes of the largest caches of this machine together; 0 where the system does not say.

    root: directory that holds "sys" (tests).
    """
    found: dict[tuple[int, str], int] = {}
    for folder in (root or Path("/")).glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        level, size = _text(folder / "level"), _text(folder / "size")
        if level.isdigit() and size[:-1].isdigit() and size[-1:] in ("K", "M"):
            shared = _text(folder / "shared_cpu_list") or folder.parent.parent.name
            found[int(level), shared] = int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
