"""Which CPUs this process may use, and where workers go: cores first, siblings last, nodes in turn.

Reads /proc and /sys (or a copy of them under another root); knows no threads and no experts.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from strata.core.errors import SettingError


@dataclass(frozen=True)
class Cpu:
    """One logical CPU. core: lowest CPU number among its siblings; node: NUMA node."""

    id: int
    core: int
    node: int


@dataclass(frozen=True)
class Topology:
    """The logical CPUs that this process may use; the cgroup's quota in CPUs (None: no quota)."""

    cpus: tuple[Cpu, ...]
    quota_cpus: float | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have usable CPUs, ascending."""
        return tuple(sorted({cpu.node for cpu in self.cpus}))

    @property
    def n_cores(self) -> int:
        """Physical cores among the usable CPUs."""
        return len({cpu.core for cpu in self.cpus})

    @property
    def n_parallel(self) -> int:
        """Threads that can really run at once: usable CPUs, cut by the quota."""
        if self.quota_cpus is None:
            return len(self.cpus)
        return max(1, min(len(self.cpus), math.ceil(self.quota_cpus)))

    @property
    def default_workers(self) -> int:
        """One worker per physical core, cut by the quota."""
        return min(self.n_cores, self.n_parallel)


def parse_cpu_list(text: str) -> list[int]:
    """Kernel list format: "0-3,8" -> [0, 1, 2, 3, 8]; empty text -> []."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: Collection[int]) -> str:
    """[0, 1, 2, 3, 8] -> "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def read_topology(root: Path | None = None, allowed: Collection[int] | None = None) -> Topology:
    """The usable CPUs of this machine; where files are lacking: one node, one thread a core.

    root: directory that holds "sys" and "proc" (tests); allowed: instead of the affinity.
    """
    base = root or Path("/")
    if allowed is None:
        allowed = _affinity()
    system = base / "sys/devices/system"
    node_of: dict[int, int] = {}
    for folder in sorted((system / "node").glob("node[0-9]*")):
        for cpu in parse_cpu_list(_read(folder / "cpulist")):
            node_of[cpu] = int(folder.name[4:])
    cpus = []
    for cpu in sorted(allowed):
        folder = system / f"cpu/cpu{cpu}/topology"
        siblings = parse_cpu_list(
            _read(folder / "core_cpus_list") or _read(folder / "thread_siblings_list")
        )
        cpus.append(Cpu(cpu, min(siblings, default=cpu), node_of.get(cpu, 0)))
    return Topology(tuple(cpus), _quota_cpus(base))


def plan_affinity(topology: Topology, n: int, node: int | None = None) -> list[int]:
    """CPU for each of n workers.

    Every core once before any sibling; nodes take turns. With ``node`` its CPUs only. More workers
    than CPUs share them in the same order. SettingError for n < 1 or a node without usable CPUs.
    """
    if n < 1:
        raise SettingError(f"{n} CPU workers asked for; at least 1 is needed")
    nodes = topology.nodes if node is None else (node,)
    if node is not None and node not in topology.nodes:
        raise SettingError(
            f"NUMA node {node} has no CPU that this process may use; usable nodes: "
            f"{', '.join(map(str, topology.nodes))}"
        )
    # rank of a CPU: how many usable siblings of its core come before it
    seen: Counter[int] = Counter()
    by_rank_node: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(topology.cpus, key=lambda c: c.id):
        by_rank_node.setdefault((seen[cpu.core], cpu.node), []).append(cpu.id)
        seen[cpu.core] += 1
    order: list[int] = []
    for rank in range(max(seen.values(), default=0)):
        columns = [by_rank_node.get((rank, each), []) for each in nodes]
        order.extend(cpu for turn in zip_longest(*columns) for cpu in turn if cpu is not None)
    return [order[i % len(order)] for i in range(n)]


def affinity_report(
    topology: Topology, cpus: Sequence[int], expert_bytes: Mapping[int, int] | None = None
) -> list[str]:
    """One line per NUMA node: its workers, their CPUs, and the bytes of experts that lie there."""
    node_of = {cpu.id: cpu.node for cpu in topology.cpus}
    lines = []
    for node in topology.nodes:
        mine = [cpu for cpu in cpus if node_of.get(cpu) == node]
        line = f"node {node}: {len(mine)} workers"
        if mine:
            line += f" on CPUs {format_cpu_list(mine)}"
        if expert_bytes is not None:
            line += f", {expert_bytes.get(node, 0) / 2**30:.2f} GiB of experts"
        lines.append(line)
    return lines


def _affinity() -> set[int]:
    """CPUs that the scheduler lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    """Text of a small file; empty when it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _quota_cpus(base: Path) -> float | None:
    """Smallest CPU quota on the path from this process's cgroup to the root, versions 2 and 1."""
    quotas: list[float] = []
    for line in _read(base / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = base / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = mount / path.lstrip("/")
        # inside a container the path may not exist: its own group is then mounted at the root
        for place in (folder, *folder.parents):
            quota = _quota_of(place)
            if quota is not None:
                quotas.append(quota)
            if place == mount:
                break
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    """Quota of one cgroup in CPUs."""
    fields = _read(folder / "cpu.max").split()
    if not fields:
        fields = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    try:
        quota, period = int(fields[0]), int(fields[1])
    except (IndexError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
