"""Several sizes of the fast tier on one engine: experts stay in main memory, only the slots are
made anew, so that a model is loaded once for a whole table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from strata.bench.protocol import Decoder, Run
from strata.core.errors import SettingError
from strata.core.types import Place
from strata.engine.engine import Engine
from strata.experts.fast_tier import even_profile, read_profile
from strata.experts.share_control import SOUGHT, ShareControl

MOST_SETTLING = 480
"""Windows after which a PCIe share that is still sought is taken as it is."""


def require_no_swaps(adapting: object) -> None:
    """SettingError when cached experts are exchanged."""
    if adapting:
        raise SettingError(
            "several sizes of the fast tier on one engine exclude --adapt-swaps: what it moved for "
            "one size would be kept for the next; give one size a call"
        )


class Slots:
    """The fast tier of a loaded engine, in other sizes than it was loaded with."""

    def __init__(self, engine: Engine) -> None:
        require_no_swaps(engine.adapter)
        self._engine = engine
        counts = [len(addresses) for addresses in engine.service.tier.address_LE]
        profile = engine.settings.expert_profile
        self._pairs = even_profile(counts) if profile is None else read_profile(profile, counts)

    @property
    def n_pairs(self) -> int:
        """Experts that can be held."""
        return len(self._pairs)

    def resize(self, n_slots: int) -> None:
        """So many slots, filled as at the start; the PCIe share is sought anew."""
        if n_slots > len(self._pairs):
            raise SettingError(
                f"{n_slots} slots: the model (or its profile) has {len(self._pairs)} experts"
            )
        tier = self._engine.service.tier
        tier.resize(n_slots)
        tier.impose(self._pairs[:n_slots])
        share = getattr(self._engine.runner, "share", None)
        if share is not None:
            share.restart()


def settle(decoder: Decoder, variants: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Run windows until the PCIe share of every variant has been found; how many they were. Nothing
    where no share is sought."""
    runner, plan = decoder.engine.runner, decoder.plan
    share = getattr(runner, "share", None)
    if share is None or _all_resident(decoder.engine):
        return 0
    size, windows = plan.window or 1, 0
    for name, variant in variants.items():
        while not share.resting(size) and windows < MOST_SETTLING * len(variants):
            if not _seeks(share, variant):
                break
            before = decoder.engine.service.counters.total(Place.PCIE)
            run = decoder.write(variant, Run(name, -3, 0, 0), decoder.read(0)[:2])
            windows += run.windows
            if decoder.engine.service.counters.total(Place.PCIE) == before == 0:
                break
    if any(_seeks(share, variant) for variant in variants.values()):
        moved = ", ".join(map(str, share.kept(size)[: size * _n_active(decoder.engine)]))
        say(f"PCIe share after {windows} windows: {share.share(size) / 256:.2f}; experts of 1, 2, "
            f".. missed: {moved}")  # fmt: skip
    return windows


def _seeks(share: ShareControl, variant: Any) -> bool:
    """Whether windows of a variant look for the PCIe share."""
    own = getattr(variant, "share", None)
    sought = share.seeks if own is None else own == SOUGHT
    return sought and not getattr(variant, "share_rests", False)


def _n_active(engine: Engine) -> int:
    return int(engine.runner.network.n_active)


def share_rests(engine: Engine, size: int) -> bool:
    """Whether no PCIe share is being sought for windows of that size."""
    share = getattr(engine.runner, "share", None)
    return share is None or not share.seeks or share.resting(size) or _all_resident(engine)


def _all_resident(engine: Engine) -> bool:
    return all((addresses != 0).all() for addresses in engine.service.tier.address_LE)


class Phases:
    """Seconds of each phase of loading; a ``Progress``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._began = "start", time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """See ``Progress``."""
        if phase != self._name:
            self._turn(phase)
        elif done == total:
            self._turn(f"after {phase}")

    def end(self) -> None:
        """Loaded."""
        self._turn("")

    def _turn(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._began
        self._name, self._began = name, now

    def line(self) -> str:
        """For people."""
        parts = ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items() if s >= 0.05)
        return f"loaded in {sum(self.seconds.values()):.1f} s: {parts}"
