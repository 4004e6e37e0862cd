"""Arms of a comparison: settings written as ``name=value,name=value``, and how an engine takes
them.

Settings that only change how windows run become another variant of a loaded engine; an arm with any
other setting needs an engine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strata.core.errors import InputError, SettingError
from strata.core.settings import SETTINGS, Settings, require_known
from strata.core.settings_load import Effective
from strata.engine.build import Ready
from strata.engine.calibrate import fix_thresholds, wanted
from strata.engine.engine import Engine
from strata.engine.off_here import require_arm
from strata.engine.variants import build_variant
from strata.formats.tokenizer import Tokenizer
from strata.window.run import WindowRunner

WINDOW_SETTINGS = ("defer_cpu", "defer_layers", "defer_cpu_below", "route_tail_skip")
"""Settings that make a variant of windows and touch nothing else."""

OFF = "off"
SCALE_SHARE = 0.7
"""The scale arm skips missed experts from rank ceil(0.7 K) on: upstream's 7 of 10."""


@dataclass(frozen=True)
class Arm:
    """A name for people and the settings that differ from the reference's, in text form."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_variant(self) -> bool:
        """Whether a loaded engine can run it as another variant of its windows."""
        return set(self.overrides) <= set(WINDOW_SETTINGS)

    def settings(self, base: Settings) -> Settings:
        """The base with this arm's values; SettingError naming the arm."""
        try:
            return replace(base, **self.overrides)
        except SettingError as error:
            raise SettingError(f"arm {self.name}: {error}") from None

    def effective(self, asked: Effective) -> Effective:
        """What to load for it; the values count as asked for by the arm."""
        sources = {**asked.sources, **dict.fromkeys(self.overrides, f"arm {self.name}")}
        return Effective(self.settings(asked.settings), sources)


def parse_arms(text: str) -> list[Arm]:
    """``off;defer_cpu=1;defer_cpu=1,defer_cpu_below=0.1``: arms between semicolons, ``off`` for
    the reference itself (it is always measured, so it gives no arm). A piece without "=" continues
    the value before it (defer_layers=1,2). SettingError for what is no setting of the engine."""
    arms: list[Arm] = []
    for part in (p.strip() for p in text.split(";")):
        if part in ("", OFF):
            continue
        arm = Arm(part, _overrides(part))
        arm.settings(Settings())  # a contradiction shows before anything is loaded
        if arm.overrides in [other.overrides for other in arms]:
            raise SettingError(f"arm {part} is given twice")
        arms.append(arm)
    return arms


def _overrides(part: str) -> dict[str, str]:
    found: dict[str, str] = {}
    last = ""
    for piece in part.split(","):
        name, sign, value = (x.strip() for x in piece.partition("="))
        if sign:
            last = name.removeprefix("--").replace("-", "_")
            if last in found:
                raise SettingError(f"arm {part}: {last} is given twice")
            found[last] = value
        elif last:
            found[last] += f",{piece}"
        else:
            raise SettingError(f"arm {part!r} is no list of name=value, nor {OFF!r}")
    require_known(found, SETTINGS, f"setting in arm {part}:")
    for name in found:
        if SETTINGS[name].scope != "engine":
            raise SettingError(f"arm {part}: {name} is about sampling, which nothing here does")
    return found


def require_arms(arms: Sequence[Arm], asked: Effective, ready: Ready) -> list[Settings]:
    """The arms' complete settings; SettingError naming an arm that this model or machine cannot
    have, before the reference is measured."""
    spec, n_pairs = ready.plan.spec, ready.plan.n_pairs
    return [require_arm(arm.name, arm.effective(asked), spec, n_pairs) for arm in arms]


def require_plain(base: Settings) -> None:
    """SettingError when the reference itself would run a lossy variant."""
    defaults = Settings()
    for name in WINDOW_SETTINGS:
        if getattr(base, name) != getattr(defaults, name):
            raise SettingError(
                f"{SETTINGS[name].flag} would change the reference; write it as an arm: "
                f"--arms 'off;{name}={SETTINGS[name].show(getattr(base, name))}'"
            )


def scale_rank(n_active: int) -> int:
    """Rank of the scale arm for K experts a token; with 2 or 3 the last one goes."""
    return max(1, min(math.ceil(SCALE_SHARE * n_active), n_active - 1))


def standard_arms(n_active: int) -> list[Arm]:
    """The rows every table has beside the floor: check (the sums of deferral in the layer itself)
    and scale (a known step: tail skip)."""
    return [
        Arm("check", {"defer_cpu": "check"}),
        Arm("scale", {"route_tail_skip": scale_rank(n_active)}),
    ]


@dataclass(frozen=True)
class InUse:
    """off: settings that have no effect here, and why; lines: thresholds worked out for it."""

    off: Mapping[str, str]
    lines: tuple[str, ...] = ()


def use_variant(engine: Engine, settings: Settings, window: int = 1) -> InUse:
    """From now on the engine's windows of ``window`` tokens run by these settings.

    settings: may differ from the engine's own in WINDOW_SETTINGS only. The sequence is dropped.
    SettingError for what a device's windows cannot do.
    """
    runner = engine.runner
    engine.reset()
    key = ",".join(f"{name}={getattr(settings, name)}" for name in WINDOW_SETTINGS)
    if not isinstance(runner, WindowRunner):
        make: Callable[[Settings], Any] | None = getattr(runner, "variant_for", None)
        if make is None and settings != engine.settings:
            raise SettingError(f"this device's windows run as they were loaded; not with {key}")
        if make is not None:
            runner.variant = make(settings)
        if not wanted(settings) or not any(runner.variant.late_L):
            return InUse({})
        lines = fix_thresholds(runner, settings, [window], tokenizer_or_none(engine))
        return InUse({}, tuple(lines))
    made = build_variant(settings, runner.network, engine.service)
    runner.variant = replace(made.default, name=f"{made.default.name} {key}")
    if not wanted(settings) or "defer_cpu" in made.why_not:
        return InUse(made.why_not)
    lines = fix_thresholds(runner, settings, [window], tokenizer_or_none(engine))
    return InUse(made.why_not, tuple(lines))


def tokenizer_or_none(engine: Engine) -> Tokenizer | None:
    """The engine's tokenizer, if it has one that works."""
    try:
        return engine.tokenizer
    except InputError:
        return None
