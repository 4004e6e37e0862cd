"""The ways windows run here: which features change their steps, and why others are off.

A feature of the window is one row of FEATURES: the setting that asks for it, what it adds to a
variant, and ``why_not``, the one-line reason why it is off for this model. Nothing else knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from strata.core.errors import SettingError
from strata.core.settings import Settings
from strata.experts.late import late_rule
from strata.experts.service import ExpertService
from strata.experts.tail_skip import tail_rule
from strata.models.network import MoeFfn, Network
from strata.models.spec import ModelSpec, MoeSpec
from strata.window.defer import Defer, late_buffers
from strata.window.event_ring import EventRing
from strata.window.late_layers import Mode, deferrable_layers, never_late
from strata.window.repair import Repair, repair_buffers
from strata.window.run import PLAIN, Variant
from strata.window.stamps import StepTimes


@dataclass(frozen=True)
class Feature:
    """One feature: ``asked`` looks at its setting, ``why_not`` at the model (None: it can be),
    ``add`` gives the variant with it."""

    setting: str
    asked: Callable[[Settings], bool]
    why_not: Callable[[Settings, Network], str | None]
    add: Callable[[Variant, Settings, Network, ExpertService], Variant]
    lines: Callable[[Settings, Network], Sequence[str]]
    """Start-up lines when it is on."""


@dataclass(frozen=True)
class WindowVariants:
    """The variant that windows run in, what is off and why, and start-up lines."""

    default: Variant
    why_not: Mapping[str, str]
    lines: tuple[str, ...]


def build_variant(settings: Settings, network: Network, service: ExpertService) -> WindowVariants:
    """Work the settings of all features out for a model."""
    variant = PLAIN
    off: dict[str, str] = {}
    lines: list[str] = []
    for feature in FEATURES:
        if not feature.asked(settings):
            continue
        reason = feature.why_not(settings, network)
        if reason is not None:
            off[feature.setting] = reason
            continue
        variant = feature.add(variant, settings, network, service)
        lines += feature.lines(settings, network)
    return WindowVariants(variant, off, tuple(lines))


def defer_layers(settings: Settings, network: Network) -> list[int]:
    """The layers whose rows may be late; SettingError for one that cannot."""
    return require_defer_layers(settings, network.spec)


def require_defer_layers(settings: Settings, spec: ModelSpec) -> list[int]:
    """The same from the spec alone, so that it can be asked before anything is loaded."""
    able = deferrable_layers(spec)
    layers = sorted(settings.defer_layers) or able
    refused = sorted(set(layers) - set(able))
    if refused:
        raise SettingError(
            f"--defer-layers {','.join(map(str, refused))}: these cannot be late (the last layer, "
            f"one in front of an n-gram block, or one without routed experts); this model can "
            f"defer {able}"
        )
    return layers


def _why_no_deferral(settings: Settings, network: Network) -> str | None:
    if not defer_layers(settings, network):
        return "this model has no layer whose rows may be late"
    if settings.expert_cache >= _n_experts(network):
        return "every expert is in the fast tier, so the CPU computes no rows"
    return None


def _n_experts(network: Network) -> int:
    return sum(ffn.spec.n_experts for ffn in network.ffns if isinstance(ffn, MoeFfn))


def _add_deferral(
    variant: Variant, settings: Settings, network: Network, service: ExpertService
) -> Variant:
    layers = defer_layers(settings, network)
    # the thresholds of "auto" are fixed before the first window (engine/calibrate)
    automatic = settings.defer_cpu_below < 0
    below = service.late_below.of if automatic else settings.defer_cpu_below or None
    mode: Mode = "check" if settings.defer_cpu == "check" else "1"
    defer = Defer(network, service, layers, mode, split=below is not None)
    return replace(
        variant,
        name=_joined(variant, f"defer-{mode}"),
        transforms=(*variant.transforms, defer),
        rules=(*variant.rules, late_rule(layers, below)),
        buffers={**variant.buffers, **late_buffers(network)},
    )


def _joined(variant: Variant, name: str) -> str:
    """Both names where something else changes the output already."""
    return name if variant.name == PLAIN.name else f"{variant.name}+{name}"


def _add_repair(
    variant: Variant, settings: Settings, network: Network, service: ExpertService
) -> Variant:
    repair = Repair(network, service, defer_layers(settings, network))
    return replace(
        variant,
        name=variant.name.replace("defer-1", "repair"),
        transforms=(*variant.transforms, repair),
        buffers={**variant.buffers, **repair_buffers(network)},
    )


def deferral_lines(settings: Settings, spec: ModelSpec) -> list[str]:
    """What is said at start about late rows."""
    n_moe = sum(isinstance(layer.ffn, MoeSpec) for layer in spec.layers)
    return [
        f"strata verify: STRATA_VERIFY_DEFER_CPU={settings.defer_cpu} (changes the output): "
        f"rows of {len(require_defer_layers(settings, spec))} of {n_moe} expert layers may be "
        f"late; never layer {never_late(spec)}"
    ]


def _why_no_tail_skip(settings: Settings, network: Network) -> str | None:
    if settings.route_tail_skip >= network.n_active:
        return f"a token has {network.n_active} experts, so none is at that rank or behind"
    if settings.expert_cache >= _n_experts(network):
        return "every expert is in the fast tier, so none is missed"
    return None


def _add_tail_skip(
    variant: Variant, settings: Settings, network: Network, service: ExpertService
) -> Variant:
    rank = settings.route_tail_skip
    return replace(variant, name=f"skip-{rank}", rules=(*variant.rules, tail_rule(rank)))


def tail_skip_lines(settings: Settings, n_active: int) -> list[str]:
    """What is said at start about skipped experts; n_active: experts of a token."""
    rank = settings.route_tail_skip
    return [
        f"STRATA_ROUTE_TAIL_SKIP={rank} is ON (changes the output): missed experts that every "
        f"token of a window holds at rank {rank} to {n_active - 1} are not computed; "
        f"prompts are read whole"
    ]


FEATURES: tuple[Feature, ...] = (
    # skipped experts must not be shared out by the rules behind
    Feature(
        "route_tail_skip",
        lambda settings: settings.route_tail_skip > 0,
        _why_no_tail_skip,
        _add_tail_skip,
        lambda settings, network: tail_skip_lines(settings, network.n_active),
    ),
    Feature(
        "defer_cpu",
        lambda settings: settings.defer_cpu != "0",
        _why_no_deferral,
        _add_deferral,
        lambda settings, network: deferral_lines(settings, network.spec),
    ),
    Feature(
        "defer_cpu",
        lambda settings: settings.defer_cpu == "repair",
        _why_no_deferral,
        _add_repair,
        lambda settings, network: (),
    ),
    # behind whatever moves steps
    Feature(
        "verify_trace",
        lambda settings: settings.verify_trace,
        lambda settings, network: None,
        lambda variant, settings, network, service: replace(
            variant, transforms=(*variant.transforms, EventRing())
        ),
        lambda settings, network: (),
    ),
    Feature(
        "verify_profile",
        lambda settings: settings.verify_profile,
        lambda settings, network: None,
        lambda variant, settings, network, service: replace(
            variant, transforms=(*variant.transforms, StepTimes(network.spec))
        ),
        lambda settings, network: (),
    ),
)
