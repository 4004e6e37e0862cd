"""Tuned profiles: what ``strata tune`` measured of a model on a machine, and how
``--quality-budget`` chooses from it. The file format, and nothing about measuring.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from strata.core.errors import FormatError, InputError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import Effective, user_data_dir
from strata.engine.fingerprints import MachineFacts, machine_facts
from strata.experts.pack import fingerprint
from strata.formats.checkpoint import Checkpoint
from strata.formats.json_file import read_json_object

FORMAT, VERSION = "strata tuned", 1
TUNED = ("defer_cpu", "defer_layers", "defer_cpu_below", "route_tail_skip", "spec", "pcie_frac")
"""Settings that a profile decides."""

LOSSY = TUNED[:4]
WORST_BUCKET = 2.0
"""No bucket of positions may cost more than this times the budget."""

_CONDITIONS = (
    "device", "dtype", "numerics", "kv", "expert_cache", "adapt_swaps", "expert_layout",
    "experts_on_disk", "workers", "cpu_isa",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One setting as measured: what it sets (text forms), median tokens/s and their spread
    (largest less smallest), mean top-20 KL over all positions and in the worst bucket, top-1
    agreement."""

    settings: Mapping[str, str]
    tokens_s: float
    spread: float
    kl: float
    worst_kl: float
    top1: float

    @property
    def name(self) -> str:
        """For people."""
        return ",".join(f"{k}={v}" for k, v in self.settings.items()) or "exact"

    def within(self, budget: float) -> bool:
        """Whether it keeps a budget: the mean, and no bucket over twice it. 0 is exact."""
        return self.kl <= budget and self.worst_kl <= WORST_BUCKET * budget


@dataclass(frozen=True)
class TunedProfile:
    """All points of one tuning. conditions: settings that the measurements belong to."""

    model: str
    machine: str
    machine_line: str
    conditions: Mapping[str, str]
    texts: tuple[tuple[str, int], ...]
    made: str
    points: tuple[Point, ...]

    def choose(self, budget: float, spec: int | None = None) -> Point | None:
        """The fastest point within a budget, of one window size if asked."""
        able = [
            p for p in self.points
            if p.within(budget) and (spec is None or p.settings.get("spec", "1") == str(spec))
        ]  # fmt: skip
        return max(able, key=lambda p: p.tokens_s, default=None)

    def save(self, folder: Path) -> Path:
        """Write it to its place in a folder; the path."""
        path = folder / _file_name(self.model, self.machine)
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from None
        return path


def load_profile(path: Path) -> TunedProfile:
    """A stored profile; FormatError for anything else."""
    stored = read_json_object(path)
    if stored.pop("format", None) != FORMAT or stored.pop("version", None) != VERSION:
        raise FormatError(f"{path} is no tuned profile of version {VERSION}; run strata tune again")
    try:
        points = tuple(Point(**point) for point in stored.pop("points"))
        texts = tuple((str(name), int(n)) for name, n in stored.pop("texts"))
        made = TunedProfile(**stored, texts=texts, points=points)
        numbers = [x for p in points for x in (p.tokens_s, p.spread, p.kl, p.worst_kl, p.top1)]
        if not all(isinstance(x, float | int) and math.isfinite(x) for x in numbers):
            raise ValueError("a number is missing")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is damaged ({error}); run strata tune again") from None
    return made


def with_quality_budget(checkpoint: Checkpoint, asked: Effective) -> Effective:
    """The settings with what --quality-budget chooses; unchanged without one, and for 0 (exact).

    SettingError when nothing measured is within it;
    InputError when there is no profile of this model on this machine.
    """
    budget = asked.settings.quality_budget
    if budget <= 0:
        return asked
    profile, path = _find(checkpoint, asked.settings)
    spec = asked.settings.spec if asked.asked("spec") else None
    point = profile.choose(budget, spec)
    if point is None:
        raise SettingError(
            f"--quality-budget {budget:g}: nothing that {path} measured"
            + ("" if spec is None else f" with --spec {spec}")
            + " is within it; run strata tune again"
        )
    source = f"--quality-budget {budget:g}"
    chosen = {k: v for k, v in point.settings.items() if k in TUNED}
    settings = replace(asked.settings, **chosen)  # type: ignore[arg-type]
    return Effective(settings, {**asked.sources, **dict.fromkeys(chosen, source)})


def require_budget_alone(settings: Settings) -> None:
    """SettingError for a budget beside settings that it decides."""
    budget = settings.quality_budget
    if budget == SETTINGS["quality_budget"].auto:
        return
    for name in LOSSY if budget == 0 else (*LOSSY, "defer_below_profile"):
        if getattr(settings, name) != SETTINGS[name].default:
            raise SettingError(
                f"--quality-budget {budget:g} and {SETTINGS[name].flag} exclude each other: the "
                f"budget decides what may be lossy"
            )


def profile_folder(settings: Settings) -> Path:
    """Where profiles lie: --profile-dir, or a folder of the user's data."""
    return settings.profile_dir or user_data_dir() / "strata" / "tuned"


def conditions_of(settings: Settings) -> dict[str, str]:
    """What measurements depend on besides model and machine, as asked for."""
    found = {name: SETTINGS[name].show(getattr(settings, name)) for name in _CONDITIONS}
    ranked = settings.expert_profile
    digest = "none" if ranked is None else hashlib.blake2b(ranked.read_bytes()).hexdigest()[:16]
    return {**found, "expert_profile": digest}


def _find(checkpoint: Checkpoint, settings: Settings) -> tuple[TunedProfile, Path]:
    model, here = fingerprint(checkpoint, list(checkpoint.tensors)), machine_facts()
    folder = profile_folder(settings)
    path = folder / _file_name(model, here.digest)
    if not path.exists():
        raise InputError(f"--quality-budget: {_why_none(folder, model, here)}; run strata tune")
    profile = load_profile(path)
    if (profile.model, profile.machine) != (model, here.digest):
        raise InputError(
            f"--quality-budget: {path} belongs to another model or machine "
            f"({profile.machine_line}); run strata tune"
        )
    for name, value in conditions_of(settings).items():
        default = "none" if name not in SETTINGS else SETTINGS[name].show(SETTINGS[name].default)
        then = profile.conditions.get(name, default)
        if then != value:
            raise InputError(
                f"--quality-budget: {path} was measured with {name.replace('_', '-')} = "
                f"{then}, here it is {value}; use that or run strata tune"
            )
    return profile, path


def _why_none(folder: Path, model: str, here: MachineFacts) -> str:
    for path in sorted(folder.glob(f"{model[:16]}-*.json")):
        return (
            f"{folder} has a profile of this model of another machine "
            f"({load_profile(path).machine_line}), none of this one ({here.line})"
        )
    return f"{folder} has no profile of this model on this machine"


def _file_name(model: str, machine: str) -> str:
    return f"{model[:16]}-{machine}.json"
