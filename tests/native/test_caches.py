"""Caches as Linux shows them, in a tree of our own; expectations are worked out by hand."""

from __future__ import annotations

from pathlib import Path

from strata.native.caches import cache_bytes

MIB = 1 << 20


def fake_caches(root: Path, caches: dict[str, list[tuple[int, str, str]]]) -> None:
    for cpu, entries in caches.items():
        for i, (level, size, shared) in enumerate(entries):
            folder = root / f"sys/devices/system/cpu/{cpu}/cache/index{i}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")


def test_caches_of_the_last_level_are_summed_once_each(tmp_path: Path) -> None:
    """Two caches of level 3 for two cores each; without one, those of level 2; nothing known."""
    assert cache_bytes(tmp_path) == 0
    small = (1, "32K", "0")
    fake_caches(
        tmp_path / "a",
        {f"cpu{i}": [small, (3, "16384K", "0-1" if i < 2 else "2-3")] for i in range(4)},
    )
    assert cache_bytes(tmp_path / "a") == 32 * MIB
    fake_caches(tmp_path / "b", {f"cpu{i}": [(2, "1M", str(i)), (1, "48K", "0")] for i in range(2)})
    assert cache_bytes(tmp_path / "b") == 2 * MIB
