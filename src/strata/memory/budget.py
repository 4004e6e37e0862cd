"""Who owns which bytes, and whether they fit. Plain numbers; allocates nothing and knows no models.

The limit of a tier is the smallest of what the probes say (free memory, container limit, process
limit, the user's
own figure); the plan names the one that binds.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from strata.core.errors import DoesNotFitError

GIB = 1 << 30
EXPERTS = ("fast tier", "experts on their way")
"""Owners of graphics memory that take what is left."""


@dataclass(frozen=True)
class Limit:
    """Bytes that a source lets us use."""

    source: str
    n_bytes: int


@dataclass(frozen=True)
class Line:
    """One owner of memory. tier: "ram", "vram" or "disk" (mapped from the file, read on demand).
    gives: the setting that makes it smaller, if one does."""

    tier: str
    owner: str
    n_bytes: int
    gives: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """All lines and the limits they must fit. ``fits`` is the verdict."""

    entries: tuple[Line, ...]
    limits: dict[str, Limit]

    def need(self, tier: str) -> int:
        """Bytes planned in a tier."""
        return sum(line.n_bytes for line in self.entries if line.tier == tier)

    @property
    def fits(self) -> bool:
        """Whether every limited tier holds its lines."""
        return all(self.need(tier) <= limit.n_bytes for tier, limit in self.limits.items())

    def lines(self) -> list[str]:
        """Printable plan, one owner a line, then the verdict."""
        text = [f"{'tier':<5} {'owner':<44} {'GiB':>10}"]
        text += [
            f"{x.tier:<5} {x.owner:<44} {x.n_bytes / GIB:>10.3f}" for x in self.entries if x.n_bytes
        ]
        for tier in dict.fromkeys(x.tier for x in self.entries):
            limit = self.limits.get(tier)
            bound = f" of {limit.n_bytes / GIB:.3f} ({limit.source})" if limit else ""
            text.append(f"{tier:<5} {'total':<44} {self.need(tier) / GIB:>10.3f}{bound}")
        return [*text, *(["fits"] if self.fits else self.shortfalls())]

    def shortfalls(self) -> list[str]:
        """One line per tier that does not hold its lines: needed, available, source, shortfall,
        and what to do."""
        text = []
        for tier, limit in self.limits.items():
            need = self.need(tier)
            if need > limit.n_bytes:
                text.append(
                    f"does not fit: {tier} needs {need / GIB:.3f} GiB, "
                    f"{limit.n_bytes / GIB:.3f} GiB available "
                    f"(limited by {limit.source}), short by {(need - limit.n_bytes) / GIB:.3f} GiB"
                    f"; {self._way_out(tier, need - limit.n_bytes)}"
                )
        return text

    def _way_out(self, tier: str, short: int) -> str:
        """Settings whose lines are large enough to matter, the largest first."""
        given: dict[str, int] = {}
        for line in self.entries:
            if line.tier == tier and line.gives:
                given[line.gives] = given.get(line.gives, 0) + line.n_bytes
        ranked = sorted(((n, name) for name, n in given.items() if n * 20 >= short), reverse=True)
        if sum(given.values()) < short or not ranked:
            least = (self.need(tier) - sum(given.values())) / GIB
            return f"no setting helps here: {least:.3f} GiB are needed whatever is asked for"
        return "room is in " + " or ".join(f"{name} ({n / GIB:.3f} GiB)" for n, name in ranked)

    def require_fit(self) -> None:
        """Raise DoesNotFitError with the shortfalls."""
        if not self.fits:
            raise DoesNotFitError("; ".join(self.shortfalls()))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "fits": self.fits,
            "lines": [{"tier": x.tier, "owner": x.owner, "bytes": x.n_bytes} for x in self.entries],
            "limits": {t: {"source": v.source, "bytes": v.n_bytes} for t, v in self.limits.items()},
            "shortfalls": self.shortfalls(),
        }


def require_reserve(plan: MemoryPlan, free_bytes: int) -> None:
    """DoesNotFitError when a card has no room for all but cached experts, whose number goes by
    what is left: state, prompts and head would run out of memory later."""
    kept = tuple(x for x in plan.entries if x.tier == "vram" and not x.owner.startswith(EXPERTS))
    MemoryPlan(kept, {"vram": Limit("the card's free memory", free_bytes)}).require_fit()


def smallest(limits: Sequence[Limit]) -> Limit:
    """The limit that binds."""
    return min(limits, key=lambda limit: limit.n_bytes)


@dataclass(frozen=True)
class Probes:
    """Where facts about the machine come from; tests give their own."""

    available_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available)
    cgroup_root: Path = Path("/sys/fs/cgroup")
    own_cgroups: Path = Path("/proc/self/cgroup")
    address_space_bytes: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_AS)[0]


def ram_limits(probes: Probes) -> list[Limit]:
    """What the machine, the container and the process limits still allow.

    Swap is not counted: experts in swap would run at the speed of the disk.
    """
    limits = [Limit("the machine's available memory", probes.available_bytes())]
    limits += cgroup_limits(probes)
    address_space = probes.address_space_bytes()
    if 0 < address_space < 1 << 62:
        limits.append(Limit("the process limit on address space (ulimit -v)", address_space))
    return limits


def cgroup_limits(probes: Probes) -> list[Limit]:
    """Free bytes under each container or slice limit that holds for this process (cgroup v2 and
    v1)."""
    found: list[Limit] = []
    for folder in _own_folders(probes):
        for limit_name, used_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / limit_name)
            if limit is None or limit >= 1 << 60:
                continue
            # file cache is given back before anybody is killed
            free = limit - (_number(folder / used_name) or 0) + _stat(folder, cache_key)
            found.append(
                Limit(f"the container's limit of {limit / GIB:.2f} GiB", max(0, min(limit, free)))
            )
    return found


def _own_folders(probes: Probes) -> list[Path]:
    """Cgroup folders of this process, innermost first, up to the root."""
    folders: list[Path] = []
    try:
        text = probes.own_cgroups.read_text(encoding="utf-8")
    except OSError:
        text = ""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = probes.cgroup_root / ("memory" if controllers else "")
        inner = base / path.strip("/")
        while True:
            folders.append(inner)
            if inner == base or base not in inner.parents:
                break
            inner = inner.parent
    folders += [probes.cgroup_root, probes.cgroup_root / "memory"]
    return list(dict.fromkeys(folders))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(folder: Path, key: str) -> int:
    try:
        text = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
