"""The ways windows run on a device: which features change their steps, and why others are off."""

from __future__ import annotations

import math

from strata.core.errors import SettingError
from strata.core.settings import Settings
from strata.engine.variants import require_defer_layers
from strata.experts.device_service import DeviceService
from strata.models.gpu.network import GpuNetwork
from strata.models.spec import MoeSpec
from strata.window.defer import Mode, never_late
from strata.window.device_defer import DeviceDefer
from strata.window.device_repair import DeviceRepair
from strata.window.device_run import DeviceTransform, DeviceVariant


def device_variant(
    settings: Settings, network: GpuNetwork, service: DeviceService
) -> tuple[DeviceVariant, list[str]]:
    """The variant that the settings ask for, and what to say about it.

    SettingError for layers that cannot be late, and for what has no device form yet.
    """
    tail = settings.route_tail_skip
    lines: list[str] = []
    if settings.defer_cpu == "0":
        name = f"tail-{tail}" if tail else "exact"
        return DeviceVariant(name, tail_rank=tail), lines
    spec = network.spec
    layers = require_defer_layers(settings, spec)
    if not layers:
        return DeviceVariant(tail_rank=tail), ["defer-cpu: off here: no layer's rows may be late"]
    if settings.defer_cpu_below < 0:
        raise SettingError(
            "--defer-cpu-below auto: is measured on the CPU only in this version; give a share, "
            "such as 0.1"
        )
    below = settings.defer_cpu_below if settings.defer_cpu_below > 0 else math.inf
    mode: Mode = "check" if settings.defer_cpu == "check" else "1"
    transforms: tuple[DeviceTransform, ...] = (
        DeviceDefer(network, service, layers, mode, split=math.isfinite(below)),
    )
    if settings.defer_cpu == "repair":
        transforms += (DeviceRepair(network, layers),)
    below_L = tuple(below if i in layers else -1.0 for i in range(spec.n_layers))
    n_moe = sum(isinstance(layer.ffn, MoeSpec) for layer in spec.layers)
    lines.append(
        f"strata verify: STRATA_VERIFY_DEFER_CPU={settings.defer_cpu} (changes the output): "
        f"rows of {len(layers)} of {n_moe} expert layers may be late; "
        f"never layer {never_late(spec)}"
    )
    name = f"defer-{settings.defer_cpu}-{below:g}-{tail}"
    return DeviceVariant(name, transforms, below_L, tail), lines
