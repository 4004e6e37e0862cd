"""What the settings ask that cannot be done, or has nothing to do here, and why (C44).

Refusals need the metadata only, so they come before a weight is read. What does no harm but has
nothing to do is not refused: the start-up report and the server's status say "off here: <reason>".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from strata.core.errors import InputError, SettingError
from strata.core.files import require_file, require_folder
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import Effective
from strata.core.settings_resolve import resolve
from strata.engine.machine import probe
from strata.engine.variants import require_defer_layers
from strata.models.spec import MlaSpec, ModelSpec, MoeSpec

PLACING = (
    "expert_cache", "expert_profile", "expert_profile_save", "expert_layout", "pack",
    "experts_on_disk", "adapt_swaps", "route_tail_skip",
)  # fmt: skip
"""Settings that are about routed experts and nothing else."""

DEFERRING = ("defer_cpu", "defer_layers", "defer_cpu_below", "defer_below_profile", "overlap")
SAMPLING = ("top_k", "top_p", "min_p", "seed")
ADAPTING = ("adapt_swaps", "adapt_every", "adapt_policy", "adapt_decay")
METERS = ("quality_meter", "quality_reread")

Reasons = Iterator[tuple[Iterable[str], str]]
"""Settings, and why they have nothing to do."""


def require_possible(settings: Settings, spec: ModelSpec, n_pairs: int) -> None:
    """SettingError or InputError for what this model, device or disk cannot do; loads nothing.

    n_pairs: routed experts of all layers together.
    """
    for name in PLACING if n_pairs == 0 else ():
        if getattr(settings, name) not in (0, -1, None, False, "auto"):
            raise SettingError(
                f"{SETTINGS[name].flag}: {spec.family} has no routed experts to place"
            )
    if settings.expert_cache > n_pairs:
        raise SettingError(
            f"--expert-cache {settings.expert_cache}: this model has only {n_pairs} experts"
        )
    if settings.defer_layers:
        require_defer_layers(settings, spec)
    if settings.logpos is not None and settings.logpos_extra >= spec.n_vocab:
        raise InputError(
            f"--logpos-extra {settings.logpos_extra} is outside the vocabulary of {spec.n_vocab}"
        )
    if settings.device == "cuda":
        _require_device_form(settings, spec)


def require_arm(name: str, asked: Effective, spec: ModelSpec, n_pairs: int) -> Settings:
    """Complete settings of an arm of a comparison; SettingError naming it when this model or
    machine cannot have it."""
    try:
        settings = resolve(asked, probe(), spec.max_context_tokens).settings
        require_possible(settings, spec, n_pairs)
    except SettingError as error:
        raise SettingError(f"arm {name}: {error}") from None
    return settings


def _require_device_form(settings: Settings, spec: ModelSpec) -> None:
    if settings.quality_reread:
        raise SettingError("--quality-reread needs --device cpu in this version")
    if settings.numerics == "fast" and any(isinstance(x.mixer, MlaSpec) for x in spec.layers):
        raise SettingError(
            f"--numerics fast: {spec.family} has latent attention, whose prompts have no "
            f"tensor-core form in this version; use exact"
        )


def require_outputs(settings: Settings) -> None:
    """InputError for a file or folder that could not be written when its time comes."""
    for name in ("logpos", "expert_profile_save"):
        path = getattr(settings, name)
        if path is not None:
            require_file(SETTINGS[name].flag, path)
    times = settings.defer_below_profile
    if times is not None and not times.exists():  # else it is read, and may be read-only
        _require_place("--defer-below-profile", times.parent)  # is made when they are stored
        if times.parent.is_dir():
            require_file("--defer-below-profile", times)
    if settings.pack is not None:
        _require_place("--pack", settings.pack)
    if settings.park_dir:
        require_folder("--park-dir", Path(settings.park_dir), "conversations")


def _require_place(flag: str, folder: Path) -> None:
    """A folder is there or may be made; it is not made yet, because the plan may not fit."""
    first = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not first.is_dir():
        raise InputError(f"{flag} {folder}: {first} is not a folder; name a new or empty one")
    if not os.access(first, os.R_OK | os.X_OK):
        raise InputError(f"{flag} {folder}: {first} may not be opened; name another folder")


def without_effect(
    settings: Settings, spec: ModelSpec, n_pairs: int, n_resident: int
) -> dict[str, str]:
    """Setting -> why it has nothing to do, for those that were set to something.

    n_pairs: routed experts of all layers; n_resident: those in the fast tier.
    """
    off: dict[str, str] = {}
    asked = {n for n, info in SETTINGS.items() if getattr(settings, n) != info.default}
    for reasons in (
        _by_arithmetic(settings),
        _by_another_setting(settings),
        _by_device(settings),
        _by_experts(settings, spec, n_pairs, n_resident),
        _by_deferral(settings, spec, n_pairs, n_resident),
    ):
        for names, why in reasons:
            for name in asked.intersection(names):
                off.setdefault(name, why)
    lossy = {"defer_cpu", "route_tail_skip"} & asked - off.keys()
    for name in asked.intersection(METERS) if not lossy else ():
        off[name] = "every window is exact, so there is nothing to compare"
    return off


def _by_arithmetic(s: Settings) -> Reasons:
    if s.dtype == "float64":
        yield ("workers", "cpu_isa"), "float64 runs the plain reference operations"
    if s.temperature == 0:
        yield SAMPLING, "temperature is 0, the most likely token is taken"
    if s.numerics == "fast" and s.device == "cpu":
        yield ("numerics",), "the CPU has one arithmetic, and it is the exact one"


def _by_another_setting(s: Settings) -> Reasons:
    if s.logpos is None:
        yield ("logpos_top", "logpos_extra"), "--logpos is not set"
    if s.quality_budget <= 0:
        why = "0, which needs no profile" if s.quality_budget == 0 else "not set"
        yield ("profile_dir",), f"--quality-budget is {why}"
    if s.quality_budget == 0:
        yield ("quality_budget",), "0 is exact, so nothing lossy is chosen"
    if s.checkpoints == 0:
        why = "--checkpoints is 0, and conversations without one are not kept"
        yield ("park_gb", "park_dir"), why


def _by_device(s: Settings) -> Reasons:
    if s.device == "cpu":
        yield ("pcie_frac",), "there is no GPU to read experts over PCIe"
        yield ("wait",), "there is no GPU that waits"
        yield ("short_read",), "the CPU computes chunks and windows alike"
        yield ("prompt_cpu",), "the CPU computes all of every prompt"
        return
    yield (
        ("verify_trace",),
        "rings are answered by native code; the error of a stall names the layer",
    )
    yield ("poison",), "buffers of a recorded window are not poisoned in this version"
    if s.experts_on_disk:
        why = "experts stay on disk, where the GPU cannot read them"
        yield ("pcie_frac",), why
        yield ("short_read", "numerics", "prompt_cpu"), f"{why}: prompts are read through windows"


def _by_experts(s: Settings, spec: ModelSpec, n_pairs: int, n_resident: int) -> Reasons:
    if n_pairs == 0:
        yield ("pcie_frac", "prompt_cpu", "wait"), "this model has no routed experts"
        return
    if n_resident == 0:
        yield ("expert_profile",), "expert-cache is 0, so nothing is placed by it"
        yield ADAPTING, "the expert cache has no slot"
    if n_resident == n_pairs:
        why = "every expert is in the fast tier, none is missed"
        yield ("pcie_frac", "prompt_cpu", "route_tail_skip", "wait"), why
        yield ADAPTING, "the expert cache holds every expert"
    n_active = max(x.ffn.n_active for x in spec.layers if isinstance(x.ffn, MoeSpec))
    if s.route_tail_skip >= n_active:
        why = f"a token has {n_active} experts, so none is at that rank or behind"
        yield ("route_tail_skip",), why


def _by_deferral(s: Settings, spec: ModelSpec, n_pairs: int, n_resident: int) -> Reasons:
    if s.defer_cpu == "0":
        if not s.route_tail_skip:
            yield ("overlap",), "nothing is deferred or skipped, so every window is exact"
        return
    if not require_defer_layers(s, spec):
        yield DEFERRING, "this model has no layer whose rows may be late"
    elif n_resident == n_pairs:
        yield DEFERRING, "every expert is in the fast tier, so the CPU computes no rows"
