"""C15: workers go to cores first, siblings last, nodes in turn; the report names them by node."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.core.errors import SettingError
from strata.native import CpuPool
from strata.native.topology import (
    Cpu,
    Topology,
    affinity_report,
    format_cpu_list,
    parse_cpu_list,
    plan_affinity,
    read_topology,
)

# node 0 has CPUs 0-7 and 16-23, node 1 has 8-15 and 24-31; siblings are n and n + 16
C15 = Topology(tuple(Cpu(n, n % 16, n % 16 // 8) for n in range(32)))


def test_eight_workers_on_node_1_take_8_to_15() -> None:
    """Expectation: C15."""
    assert plan_affinity(C15, 8, node=1) == list(range(8, 16))


def test_sixteen_workers_use_each_core_once() -> None:
    """Expectation: C15."""
    assert sorted(plan_affinity(C15, 16)) == list(range(16))


def test_siblings_come_only_after_all_cores() -> None:
    """Expectation: C15, for every count, on all nodes and on one."""
    for n in range(1, 33):
        cpus = plan_affinity(C15, n)
        assert len(set(cpus)) == n
        assert len({cpu % 16 for cpu in cpus}) == min(n, 16)
    assert plan_affinity(C15, 10, node=1) == [*range(8, 16), 24, 25]


def test_nodes_take_turns() -> None:
    """Few workers spread over the nodes, so that both memories are read. Expectation: by hand."""
    assert plan_affinity(C15, 4) == [0, 8, 1, 9]


def test_more_workers_than_cpus_share_them() -> None:
    """Expectation: by hand."""
    two = Topology((Cpu(0, 0, 0), Cpu(1, 1, 0)))
    assert plan_affinity(two, 7) == [0, 1, 0, 1, 0, 1, 0]


def test_report_lists_workers_and_expert_bytes_by_node() -> None:
    """Expectation: C15, by hand."""
    report = affinity_report(C15, plan_affinity(C15, 18), {0: 3 << 30, 1: 1 << 29})
    assert report == [
        "node 0: 9 workers on CPUs 0-7,16, 3.00 GiB of experts",
        "node 1: 9 workers on CPUs 8-15,24, 0.50 GiB of experts",
    ]
    assert affinity_report(C15, [8])[0] == "node 0: 0 workers"


def test_refusals() -> None:
    """Expectation: one clear line each."""
    with pytest.raises(SettingError, match="0 CPU workers"):
        plan_affinity(C15, 0)
    with pytest.raises(SettingError, match="node 2 has no CPU.*0, 1"):
        plan_affinity(C15, 1, node=2)
    with pytest.raises(SettingError, match="0 CPU workers"):
        CpuPool(0)
    with pytest.raises(SettingError, match="2 CPU workers with 1 CPUs"):
        CpuPool(2, cpus=[0])
    with pytest.raises(SettingError, match=r"CPUs \[100000\] are not among"):
        CpuPool(1, cpus=[100000])


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def fake_machine(root: Path) -> None:
    """The C15 machine as Linux shows it."""
    write(root, "sys/devices/system/node/node0/cpulist", "0-7,16-23")
    write(root, "sys/devices/system/node/node1/cpulist", "8-15,24-31")
    for n in range(32):
        siblings = f"{n % 16},{n % 16 + 16}"
        write(root, f"sys/devices/system/cpu/cpu{n}/topology/core_cpus_list", siblings)


def test_reads_the_machine(tmp_path: Path) -> None:
    """Expectation: the topology written there; CPUs outside the affinity are not used."""
    fake_machine(tmp_path)
    assert read_topology(tmp_path, range(32)) == C15
    some = read_topology(tmp_path, [3, 8, 19, 24])
    assert [cpu.id for cpu in some.cpus] == [3, 8, 19, 24]
    assert some.n_cores == some.default_workers == 2
    assert plan_affinity(some, 4) == [3, 8, 19, 24]


def test_bare_machine(tmp_path: Path) -> None:
    """Without /sys every CPU is a core of node 0. Expectation: by hand."""
    assert read_topology(tmp_path, [4, 5]) == Topology((Cpu(4, 4, 0), Cpu(5, 5, 0)))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/gone", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/y",
                "sys/fs/cgroup/cpu/y/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/y/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
    ],
)
def test_cgroup_quota_limits_workers(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    """Both cgroup versions, own group or a parent. Expectation: by hand, quota rounded up."""
    fake_machine(tmp_path)
    for name, text in files.items():
        write(tmp_path, name, text)
    topology = read_topology(tmp_path, range(32))
    assert topology.quota_cpus == quota
    assert topology.default_workers == {2.5: 3, None: 16, 4.0: 4, 3.0: 3}[quota]


def test_cpu_lists() -> None:
    """Expectation: the kernel's list format."""
    assert parse_cpu_list("0-2,5,7-8\n") == [0, 1, 2, 5, 7, 8]
    assert parse_cpu_list("") == []
    assert format_cpu_list([8, 1, 0, 2, 7, 5]) == "0-2,5,7-8"


def test_this_machine_runs_a_pool_where_planned() -> None:
    """Workers sit on the CPUs that the pool names. Expectation: the system's own record."""
    pool = CpuPool(2)
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("needs /proc")
    allowed = []
    for status in tasks.glob("*/status"):
        fields = dict(
            line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
        )
        allowed.append(parse_cpu_list(fields["Cpus_allowed_list"]))
    pool.close()
    assert [pool.cpus[1]] in allowed
