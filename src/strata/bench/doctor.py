"""What a machine is, and what about it will make decoding slow: facts and findings.

Looks at files of the system only (root: another place for them, in tests); measures nothing and
knows no models. A finding says what is so, what it costs, and what to do.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from strata.core.settings_resolve import Machine
from strata.memory.budget import GIB, Probes, ram_limits, smallest
from strata.native.topology import Topology, format_cpu_list

_THP = "sys/kernel/mm/transparent_hugepage/enabled"
_GOVERNOR = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
_MEMINFO = "proc/meminfo"
BUSY = 0.25
"""Load of others per core from which measurements say little."""


@dataclass(frozen=True)
class Finding:
    """``slow``: it costs speed; otherwise good to know."""

    text: str
    slow: bool = True

    def line(self) -> str:
        """For people."""
        return f"{'slow:' if self.slow else 'note:'} {self.text}"


@dataclass(frozen=True)
class Look:
    """Where facts come from; tests give their own."""

    machine: Machine
    topology: Topology
    probes: Probes = field(default_factory=Probes)
    root: Path = Path("/")
    load: Callable[[], float] = lambda: os.getloadavg()[0]
    memlock_bytes: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    gpu: Callable[[], dict[str, Any]] = lambda: gpu_facts()

    def read(self, name: str) -> str:
        """A small file of the system; "" when it is not there."""
        try:
            return (self.root / name).read_text().strip()
        except OSError:
            return ""


def machine_lines(look: Look) -> list[str]:
    """What this machine is."""
    topology, machine = look.topology, look.machine
    ids = [cpu.id for cpu in topology.cpus]
    quota = topology.quota_cpus
    limit = smallest(ram_limits(look.probes))
    lines = [
        f"GPU: {machine.gpu or 'none: ' + machine.gpu_report}",
        *_gpu_lines(look.gpu()),
        f"CPU: {machine.cpu_cores} cores to use of CPUs {format_cpu_list(ids)}"
        + (f", at most {quota:g} at a time by the container" if quota else "")
        + f"; kernels: {', '.join(machine.cpu_isas)}",
        f"NUMA nodes: {len(topology.nodes)}",
        f"memory: {limit.n_bytes / GIB:.1f} GiB to use ({limit.source})",
        f"huge pages: {_chosen(look.read(_THP)) or 'unknown'}",
        f"page-locking: {_bytes(look.memlock_bytes())}",
    ]
    return lines


def findings(look: Look, device: str) -> list[Finding]:
    """What will be slow here, and why."""
    found: list[Finding] = []
    topology = look.topology
    if device == "cpu" and look.machine.gpu is not None:
        found.append(Finding(f"--device cpu leaves the {look.machine.gpu} unused"))
    if device == "cpu" and look.machine.gpu is None:
        found.append(Finding("there is no GPU: dense weights and experts share the memory's speed"))
    found += _of_the_cpu(look, topology)
    thp = _chosen(look.read(_THP))
    if thp == "never":
        found.append(Finding(
            "transparent huge pages are off: experts lie in 4 KiB pages and reading them misses "
            f"the TLB; echo madvise > /{_THP}"))  # fmt: skip
    memlock = look.memlock_bytes()
    if device == "cuda" and 0 <= memlock < 64 << 30:
        found.append(Finding(
            f"only {_bytes(memlock)} may be page-locked: where the driver obeys it, the PCIe share "
            f"and prompts run at the speed of pageable memory; ulimit -l unlimited", slow=False,
        ))  # fmt: skip
    swapped = _swap_used(look.read(_MEMINFO))
    if swapped > 1 << 30:
        found.append(Finding(
            f"{swapped / GIB:.1f} GiB are swapped out: memory is short, and experts that are "
            f"swapped out run at the speed of the disk"))  # fmt: skip
    return found


def _of_the_cpu(look: Look, topology: Topology) -> list[Finding]:
    found = []
    cores, machine = topology.n_cores, look.machine
    busy = look.load() / max(1, cores)
    if busy > BUSY:
        found.append(Finding(
            f"other programs keep {look.load():.1f} of {cores} cores busy now: decoding, and what "
            f"is measured below, is slower by that"))  # fmt: skip
    if topology.quota_cpus and topology.quota_cpus < cores:
        found.append(Finding(
            f"the container may use {topology.quota_cpus:g} of {cores} cores at a time; more "
            f"workers would be put to sleep in mid-work"))  # fmt: skip
    if machine.cpu_isas[-1] == "portable":
        found.append(Finding("the CPU kernels have neither AVX2 nor AVX-512 here"))
    if len(topology.nodes) > 1:
        found.append(Finding(
            f"{len(topology.nodes)} NUMA nodes: experts lie where they were written first, and "
            f"cores of the other node read them more slowly", slow=False))  # fmt: skip
    governor = look.read(_GOVERNOR.format(topology.cpus[0].id)) if topology.cpus else ""
    if governor in ("powersave", "conservative"):
        found.append(Finding(
            f"the CPU's frequency governor is {governor}: cores clock up late; "
            f"cpupower frequency-set -g performance"))  # fmt: skip
    return found


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never"."""
    inside = text.partition("[")[2].partition("]")[0]
    return inside


def _swap_used(meminfo: str) -> int:
    numbers = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            numbers[name] = int(words[0]) * 1024
    return numbers.get("SwapTotal", 0) - numbers.get("SwapFree", 0)


def _bytes(n: int) -> str:
    return "no limit" if n < 0 or n >= 1 << 60 else f"{n / GIB:.2f} GiB"


def gpu_facts() -> dict[str, Any]:
    """Memory and link of the first GPU, by NVML; {} without it."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "total_bytes": int(memory.total),
            "used_bytes": int(memory.used),
            "link_gen": int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            "link_width": int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            "max_link_width": int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        }
    except Exception:  # no package, no driver or no card: nothing is known, and nothing made up
        return {}


def _gpu_lines(facts: dict[str, Any]) -> list[str]:
    if not facts:
        return []
    width = f"x{facts['link_width']}"
    if facts["link_width"] < facts["max_link_width"]:
        width += f" (the card could x{facts['max_link_width']}: check the slot)"
    return [
        f"GPU memory: {facts['total_bytes'] / GIB:.1f} GiB, {facts['used_bytes'] / GIB:.1f} in "
        f"use; link: PCIe gen {facts['link_gen']} {width}"
    ]
