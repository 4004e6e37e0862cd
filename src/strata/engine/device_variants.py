"""The ways windows run on a device: which features change their steps, and why others are off.

A feature of the window is one row of DEVICE_FEATURES, as on the CPU (``engine/variants.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strata.core.settings import Settings
from strata.engine.variants import deferral_lines, require_defer_layers, tail_skip_lines
from strata.experts.device_service import DeviceService
from strata.models.gpu.network import GpuNetwork
from strata.window.device_defer import DeviceDefer
from strata.window.device_repair import DeviceRepair
from strata.window.device_run import DeviceVariant
from strata.window.late_layers import Mode


@dataclass(frozen=True)
class DeviceFeature:
    """One feature: ``asked`` looks at its setting, ``add`` gives the variant with it, ``lines`` are
    said about it at start."""

    asked: Callable[[Settings, GpuNetwork], bool]
    add: Callable[[DeviceVariant, Settings, GpuNetwork, DeviceService], DeviceVariant]
    lines: Callable[[Settings, GpuNetwork], Sequence[str]]


def device_variant(
    settings: Settings, network: GpuNetwork, service: DeviceService
) -> tuple[DeviceVariant, list[str]]:
    """The variant that the settings ask for, and what to say about it.

    SettingError for layers that cannot be late.
    """
    variant = DeviceVariant()
    lines: list[str] = []
    for feature in DEVICE_FEATURES:
        if feature.asked(settings, network):
            variant = feature.add(variant, settings, network, service)
            lines += feature.lines(settings, network)
    return variant, lines


def _deferring(settings: Settings, network: GpuNetwork) -> bool:
    return settings.defer_cpu != "0" and bool(require_defer_layers(settings, network.spec))


def _add_deferral(
    variant: DeviceVariant, settings: Settings, network: GpuNetwork, service: DeviceService
) -> DeviceVariant:
    layers = require_defer_layers(settings, network.spec)
    late_L = tuple(i in layers for i in range(network.spec.n_layers))
    # the thresholds of "auto" are fixed before the first window (engine/calibrate)
    automatic = settings.defer_cpu_below < 0
    below = settings.defer_cpu_below or math.inf
    mode: Mode = "check" if settings.defer_cpu == "check" else "1"
    split = automatic or math.isfinite(below)
    named = "auto" if automatic else f"{below:g}"
    chosen = "" if not settings.defer_layers else "-" + ",".join(map(str, layers))
    return replace(
        variant,
        name=f"defer-{settings.defer_cpu}-{named}-{settings.route_tail_skip}{chosen}",
        transforms=(*variant.transforms, DeviceDefer(network, service, layers, mode, split)),
        below_L=None if automatic else tuple(below if late else -1.0 for late in late_L),
        late_L=late_L if automatic else (),
        share_rests=True,
    )


def _add_repair(
    variant: DeviceVariant, settings: Settings, network: GpuNetwork, service: DeviceService
) -> DeviceVariant:
    repair = DeviceRepair(network, require_defer_layers(settings, network.spec))
    return replace(variant, transforms=(*variant.transforms, repair))


def _add_tail_skip(
    variant: DeviceVariant, settings: Settings, network: GpuNetwork, service: DeviceService
) -> DeviceVariant:
    rank = settings.route_tail_skip
    return replace(variant, name=f"tail-{rank}", tail_rank=rank)


def _skip_lines(settings: Settings, network: GpuNetwork) -> Sequence[str]:
    off = settings.route_tail_skip >= network.n_active  # said by the settings' report
    return () if off else tail_skip_lines(settings, network.n_active)


DEVICE_FEATURES: tuple[DeviceFeature, ...] = (
    DeviceFeature(
        lambda settings, network: settings.route_tail_skip > 0,
        _add_tail_skip,
        _skip_lines,
    ),
    DeviceFeature(
        _deferring, _add_deferral, lambda settings, network: deferral_lines(settings, network.spec)
    ),
    DeviceFeature(
        lambda settings, network: settings.defer_cpu == "repair" and _deferring(settings, network),
        _add_repair,
        lambda settings, network: (),
    ),
)
