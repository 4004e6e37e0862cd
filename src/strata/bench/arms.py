"""Arms: the ways of running that a benchmark compares, as changes of settings.

    off, check, defer, below, repair, repair-below      by name; below: defers what a mixer can hide
    floor                        off once more: how far equal arms differ
    NAME=SETTING:VALUE[+...]     any other, for example  light=defer-cpu:1+defer-cpu-below:0.05

Arms that only change how windows run are variants of one engine and can take turns prompt by
prompt; others need an engine each (--fresh).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.core.errors import SettingError
from strata.core.settings import SETTINGS, Settings, require_known
from strata.core.settings_load import Effective
from strata.engine.engine import Engine
from strata.engine.variants import FEATURES, build_variant
from strata.window.run import WindowRunner

NAMED: Mapping[str, Mapping[str, Any]] = {
    "off": {},
    "floor": {},
    "check": {"defer_cpu": "check"},
    "defer": {"defer_cpu": "1"},
    "below": {"defer_cpu": "1", "defer_cpu_below": "auto"},
    "repair": {"defer_cpu": "repair"},
    "repair-below": {"defer_cpu": "repair", "defer_cpu_below": "auto"},
}
OF_WINDOWS = frozenset(f.setting for f in FEATURES) | {
    "defer_layers", "defer_cpu_below", "pcie_frac",
}  # fmt: skip
"""Settings that change nothing but the windows' steps and rules."""


@dataclass(frozen=True)
class Arm:
    """A name and what it changes."""

    name: str
    changes: Mapping[str, Any]

    def asked(self, base: Effective) -> Effective:
        """The settings of this arm, over those of the call."""
        if not self.changes:
            return base
        sources = {**base.sources, **dict.fromkeys(self.changes, f"arm {self.name}")}
        return Effective(self.over(base.settings), sources)

    def over(self, settings: Settings) -> Settings:
        """The same, for settings alone. SettingError names the arm."""
        try:
            return replace(settings, **self.changes)
        except SettingError as error:
            raise SettingError(f"arm {self.name}: {error}") from None

    @property
    def needs_engine(self) -> list[str]:
        """Settings that a running engine cannot change."""
        return sorted(set(self.changes) - OF_WINDOWS)


def parse_arms(text: str) -> list[Arm]:
    """Arms from a list with commas; SettingError for unknown names and settings."""
    arms = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) < len(names):
        raise SettingError(f"--arms {text or repr(text)}: give one or more different names")
    return arms


def _parse(text: str) -> Arm:
    if text in NAMED:
        return Arm(text, NAMED[text])
    name, eq, rest = text.partition("=")
    if not eq or not name or ":" not in rest:
        raise SettingError(
            f"--arms {text}: known are {', '.join(NAMED)}; others are written "
            f"NAME=SETTING:VALUE, joined by +"
        )
    changes: dict[str, str] = {}
    for part in rest.split("+"):
        key, colon, value = part.partition(":")
        key = key.strip().lstrip("-").replace("-", "_")
        require_known([key], SETTINGS)
        if not colon:
            raise SettingError(f"--arms {text}: {part!r} has no value; write SETTING:VALUE")
        changes[key] = value
    return Arm(name, changes)


def variant_of(engine: Engine, arm: Arm) -> Any:
    """The window variant of an arm on a running engine. SettingError when it cannot be one."""
    if arm.needs_engine:
        raise SettingError(
            f"arm {arm.name} changes {', '.join(arm.needs_engine)}, which is fixed when a model is "
            f"loaded; add --fresh for an engine per arm"
        )
    settings, runner = arm.over(engine.settings), engine.runner
    if isinstance(runner, WindowRunner):
        if "pcie_frac" in arm.changes:
            raise SettingError(f"arm {arm.name}: pcie-frac is off here: there is no GPU")
        made = build_variant(settings, runner.network, runner.service)
        for name, reason in made.why_not.items():
            raise SettingError(f"arm {arm.name}: {name.replace('_', '-')} is off here: {reason}")
        return replace(made.default, name=f"arm {arm.name}")
    make: Callable[[Settings], Any] | None = getattr(runner, "variant_for", None)
    if make is not None:
        try:
            return replace(make(settings), name=f"arm {arm.name}")
        except SettingError as error:
            raise SettingError(f"arm {arm.name}: {error}") from None
    if settings != engine.settings:
        raise SettingError(f"arm {arm.name}: this device's windows cannot take turns; add --fresh")
    return runner.variant


def with_steps(variant: Any, name: str, *transforms: Any, first: bool = False) -> Any:
    """A variant with more transformations, in front of or behind its own. On a device they change
    the steps as they run, fused."""
    if hasattr(variant, "last"):
        return replace(variant, name=name, last=(*variant.last, *transforms))
    own = tuple(variant.transforms)
    return replace(variant, name=name, transforms=(*transforms, *own) if first
                   else (*own, *transforms))  # fmt: skip
