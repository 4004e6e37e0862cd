"""The doctor's findings on made-up machines: each fact alone makes its finding, a good machine
none."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.bench.doctor import Look, findings, machine_lines
from strata.core.settings_resolve import Machine
from strata.memory.budget import Probes
from strata.native.topology import Cpu, Topology

GOOD = {
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "proc/meminfo": "MemTotal: 100 kB\nSwapTotal: 8388608 kB\nSwapFree: 8388608 kB",
}


def look(root: Path, files: dict[str, str] | None = None, **changes: object) -> Look:
    """A machine with a GPU, 4 free cores and nothing to complain about, but for the changes."""
    for name, text in (GOOD | (files or {})).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    nodes, quota = int(changes.pop("nodes", 1)), changes.pop("quota", None)
    gpu, isas = changes.pop("gpu_name", "Card"), changes.pop("isas", ("portable", "avx2"))
    topology = Topology(tuple(Cpu(i, i, i % nodes) for i in range(4)), quota)
    facts: dict[str, object] = {
        "load": lambda: 0.0,
        "memlock_bytes": lambda: -1,
        "gpu": dict,
        "probes": Probes(available_bytes=lambda: 8 << 30, cgroup_root=root / "none"),
        **changes,
    }
    return Look(Machine(gpu, "found Card", 4, isas), topology, root=root, **facts)


def test_a_good_machine(tmp_path: Path) -> None:
    good = look(tmp_path)
    assert findings(good, "cuda") == []
    lines = machine_lines(good)
    assert "GPU: Card" in lines and "huge pages: madvise" in lines
    assert "page-locking: no limit" in lines
    assert any(line.startswith("CPU: 4 cores to use of CPUs 0-3") for line in lines)


@pytest.mark.parametrize(
    "changes, files, device, text",
    [
        ({}, {}, "cpu", "leaves the Card unused"),
        ({"gpu_name": None}, {}, "cpu", "there is no GPU"),
        ({"load": lambda: 3.0}, {}, "cuda", "keep 3.0 of 4 cores busy"),
        ({"quota": 2.5}, {}, "cuda", "may use 2.5 of 4 cores"),
        ({"isas": ("portable",)}, {}, "cuda", "neither AVX2 nor AVX-512"),
        ({"nodes": 2}, {}, "cuda", "2 NUMA nodes"),
        ({"memlock_bytes": lambda: 8 << 20}, {}, "cuda", "only 0.01 GiB may be page-locked"),
        ({}, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "cuda",
         "huge pages are off"),
        ({}, {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, "cuda",
         "governor is powersave"),
        ({}, {"proc/meminfo": "SwapTotal: 8388608 kB\nSwapFree: 4194304 kB"}, "cuda",
         "4.0 GiB are swapped out"),
    ],
)  # fmt: skip
def test_each_trouble_is_named(
    tmp_path: Path, changes: dict[str, object], files: dict[str, str], device: str, text: str
) -> None:
    found = findings(look(tmp_path, files, **changes), device)
    assert len(found) == 1 and text in found[0].line()


def test_a_narrow_slot_is_told(tmp_path: Path) -> None:
    facts = {"total_bytes": 10 << 30, "used_bytes": 1 << 30, "link_gen": 4, "link_width": 8,
             "max_link_width": 16}  # fmt: skip
    lines = machine_lines(look(tmp_path, gpu=lambda: facts))
    assert any("PCIe gen 4 x8 (the card could x16" in line for line in lines)
