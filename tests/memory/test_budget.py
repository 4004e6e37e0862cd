"""The memory plan inside the real limit (C12), with faked probes; expectations are the probes' own
numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.core.errors import DoesNotFitError
from strata.core.settings_load import load_settings
from strata.engine.build import plan_model
from strata.memory.budget import GIB, Limit, Line, MemoryPlan, Probes, ram_limits, smallest

MODEL = Path(__file__).parents[2] / "models" / "tiny-flash-next-Q8_0.gguf"


def probes(tmp_path: Path, free_gib: float, cgroup: dict[str, str] | None = None) -> Probes:
    """A machine with that much free memory, in a container described by cgroup files."""
    own = tmp_path / "own"
    own.write_text("0::/box/inner\n")
    folder = tmp_path / "cgroup" / "box" / "inner"
    folder.mkdir(parents=True)
    for name, text in (cgroup or {}).items():
        (folder / name).write_text(text)
    return Probes(lambda: int(free_gib * GIB), tmp_path / "cgroup", own, lambda: -1)


def experts(gib: float) -> tuple[Line, ...]:
    return (Line("ram", "routed experts", int(gib * GIB)), Line("ram", "state", GIB // 4))


def test_c12a_container_limit_binds(tmp_path: Path) -> None:
    """40 GiB free on the host, 4 GiB allowed by the container."""
    limits = ram_limits(
        probes(tmp_path, 40, {"memory.max": str(4 * GIB), "memory.current": str(GIB // 2)})
    )
    plan = MemoryPlan(experts(12), {"ram": smallest(limits)})
    assert not plan.fits
    with pytest.raises(DoesNotFitError) as caught:
        plan.require_fit()
    line = str(caught.value)
    for part in ("needs 12.250 GiB", "3.500 GiB available", "container's limit of 4.00", "8.750"):
        assert part in line


def test_c12b_swap_is_not_memory(tmp_path: Path) -> None:
    """8 GiB free and any amount of swap: the plan does not count on it."""
    plan = MemoryPlan(experts(12), {"ram": smallest(ram_limits(probes(tmp_path, 8)))})
    assert not plan.fits
    assert "8.000 GiB available (limited by the machine's available memory)" in plan.shortfalls()[0]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max", "memory.current": "5"}, 40.0),
        ({"memory.max": str(8 * GIB), "memory.current": str(2 * GIB)}, 6.0),
        # file cache is given back before anybody is killed
        (
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(7 * GIB),
                "memory.stat": f"anon 5\ninactive_file {3 * GIB}\n",
            },
            4.0,
        ),
        ({"memory.max": "rubbish"}, 40.0),
    ],
)
def test_cgroup_files(tmp_path: Path, files: dict[str, str], expected: float) -> None:
    assert smallest(ram_limits(probes(tmp_path, 40, files))).n_bytes == expected * GIB


def test_an_outer_slice_binds_too(tmp_path: Path) -> None:
    faked = probes(tmp_path, 40)
    (tmp_path / "cgroup" / "box" / "memory.max").write_text(str(2 * GIB))
    assert smallest(ram_limits(faked)).n_bytes == 2 * GIB


def test_c12_plan_of_a_model_adds_up_and_names_the_limit(tmp_path: Path) -> None:
    """Plan-only: parts sum to the total, the limit is the container's, and nothing is loaded."""
    asked = load_settings({"device": "cpu"}, environ={})
    small = probes(tmp_path, 40, {"memory.max": str(GIB // 8)})
    plan = plan_model(MODEL, asked, small).memory
    assert not plan.fits and "container's limit of 0.12 GiB" in plan.shortfalls()[0]
    assert plan.need("ram") == sum(x.n_bytes for x in plan.entries if x.tier == "ram")
    owners = " ".join(x.owner for x in plan.entries)
    for part in ("routed experts", "dense weights", "state", "prompt buffers", "loading"):
        assert part in owners
    roomy = Probes(lambda: 64 * GIB, tmp_path, tmp_path / "no", lambda: -1)
    room = plan_model(MODEL, asked, roomy).memory
    assert room.fits and room.limits["ram"] == Limit("the machine's available memory", 64 * GIB)
