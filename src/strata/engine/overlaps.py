"""The variants that a request may choose with ``overlap``: exact, balanced, fast.

Windows of a variant are recorded once and kept, so a choice costs nothing while others are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from strata.core.settings import Settings
from strata.engine.variants import build_variant
from strata.experts.service import ExpertService
from strata.models.network import Network
from strata.window.run import Variant

V = TypeVar("V")
"""A variant of windows: a frozen dataclass with a ``name``."""


def overlap_variants(
    settings: Settings, network: Network, service: ExpertService, default: Variant
) -> Mapping[str, Variant]:
    """``choices`` on the CPU."""

    def make(wanted: Settings) -> Variant:
        return build_variant(wanted, network, service).default

    return choices(settings, network.n_active, default, make)


def choices(
    settings: Settings, n_active: int, default: V, make: Callable[[Settings], V]
) -> Mapping[str, V]:
    """The variant of each choice that these settings leave; ``make`` builds one.

    exact: always; nothing that changes the output. With --defer-cpu 1 or repair also
    balanced: repair, and light rows late: as --defer-cpu-below says, else those under a token's
    mean weight 1 / K (about 70 % of them, at a seventeenth of the change; docs/DETAILS.md);
    fast: all CPU rows late, with or without repair as --defer-cpu says.
    """
    plain = replace(
        settings, overlap="auto", defer_cpu="0", defer_cpu_below=0.0, defer_below_profile=None,
        defer_layers=(), route_tail_skip=0,
    )  # fmt: skip
    asked = {"exact": plain}
    if settings.defer_cpu in ("1", "repair"):
        below = settings.defer_cpu_below or 1 / max(1, n_active)
        asked["balanced"] = replace(settings, defer_cpu="repair", defer_cpu_below=below)
        asked["fast"] = replace(settings, defer_cpu_below=0.0, defer_below_profile=None)
    made: dict[str, V] = {}
    for name, wanted in asked.items():
        if _same_windows(wanted, settings):
            made[name] = default
            continue
        variant: Any = make(wanted)
        # two thresholds have the same steps and another name, under which their windows are kept
        if name != "exact" and variant.name != "exact":
            variant = replace(variant, name=f"{name}-{variant.name}")
        made[name] = variant
    return made


def _same_windows(a: Settings, b: Settings) -> bool:
    names = ("defer_cpu", "defer_cpu_below", "defer_layers", "route_tail_skip")
    return all(getattr(a, n) == getattr(b, n) for n in names)
