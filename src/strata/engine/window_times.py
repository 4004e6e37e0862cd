"""Times of plain windows in which nothing overlaps, as ``--defer-cpu-below auto`` goes by them: m,
f and c of every layer that may be late, and the routing weights of what was missed.

``Sampling`` gives a variant; whoever runs its windows tells it of each. Every layer of them waits
for its CPU rows right behind its ring. On the CPU the host's clock stands between steps. On a
device events stand in the graph, only where one part of a layer goes over into the next (a stamp
costs as much as a short kernel); c is then what the device itself waits, hand-over included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.settings import Settings
from strata.core.types import Place
from strata.engine.variants import build_variant, require_defer_layers
from strata.experts.below_auto import LayerTimes, WindowTimes
from strata.experts.late import row_shares
from strata.kernels.plan import Draft
from strata.memory.frame import Frame
from strata.window.program import Program
from strata.window.run import WindowRunner
from strata.window.stamps import BEHIND, FAST_SIDE, WAITS, EventClock, HostClock, StepTimes, coarse

CPU_PART = ("ring", "wait_cpu")

_MEASURED = itertools.count()


class Sampling:
    """Times of windows of one engine that run as ``variant`` says.

    runner: of the CPU (``WindowRunner``) or of a device. more: transformations in front, such as a
    routing trace.
    """

    def __init__(
        self, runner: Any, settings: Settings, name: str, more: Sequence[Any] = ()
    ) -> None:
        self._runner = runner
        self._own = isinstance(runner, WindowRunner)
        spec = runner.network.spec
        self.layers = require_defer_layers(settings, spec)
        self._missed: dict[int, list[tuple[float, ...]]] = {}
        recorded = not self._own and runner.network.device.type == "cuda"
        clock = EventClock if recorded else HostClock
        self._times = StepTimes(spec, clock, part_of=str if self._own else coarse)
        # a runner keeps windows by name: those of an earlier measurement stamp other times
        self.variant = self._variant(settings, f"{name} #{next(_MEASURED)}", more)

    def _variant(self, settings: Settings, name: str, more: Sequence[Any]) -> Any:
        runner = self._runner
        if not self._own:
            plain = replace(runner.overlaps["exact"], name=name, share_rests=True)
            return replace(plain, rings_apart=True, last=(*more, wait_at_once, self._times))
        plain = build_variant(
            replace(settings, defer_cpu="0", overlap="auto", **_NO_LATE), runner.network,
            runner.service,
        ).default  # fmt: skip
        return replace(
            plain,
            name=name,
            transforms=(*plain.transforms, *more, wait_at_once, self._times),
            rules=(*plain.rules, self._look),
        )

    def ran(self, n_tokens: int) -> None:
        """A window of so many tokens has run."""
        if self._own:
            return
        self._times.ended(n_tokens)
        service = self._runner.service
        for layer in self.layers:
            self._note(layer, service.missed_shares(layer, n_tokens))

    def _look(self, draft: Draft) -> None:
        """A rule that only looks: each missed expert's heaviest share."""
        heaviest_G = np.zeros(len(draft.place_G))
        np.maximum.at(heaviest_G, draft.group_R, row_shares(draft))
        self._note(draft.layer, heaviest_G[draft.place_G == Place.CPU])

    def _note(self, layer: int, heaviest: npt.NDArray[np.float64]) -> None:
        shares = tuple(round(float(share), 5) for share in heaviest)
        self._missed.setdefault(layer, []).append(shares)

    def clear(self) -> None:
        """Forget the windows so far."""
        self._times.clear()
        self._missed.clear()

    def taken(self, n_tokens: int) -> WindowTimes:
        """What was measured."""
        return WindowTimes(n_tokens, tuple(self._layer(i) for i in self.layers))

    def behind_us(self, layer: int) -> float:
        """The sum of a layer's rows and its write, which late rows do not hold up, microseconds a
        window."""
        return 1e3 * self._times.layer_ms(layer, BEHIND)

    def cpu_ms(self, layer: int) -> float:
        """c of any layer, milliseconds a window."""
        return self._times.layer_ms(layer, CPU_PART)

    def _layer(self, layer: int) -> LayerTimes:
        missed, times = tuple(self._missed.get(layer, ())), self._times
        n = sum(len(window) for window in missed)
        cpu_us = 1e3 * self.cpu_ms(layer) * len(missed) / n if n else 0.0
        fast_us = 1e3 * times.layer_ms(layer, FAST_SIDE)
        mixer_us = 1e3 * times.mixer_ms(layer + 1)
        return LayerTimes(layer, round(mixer_us, 3), round(fast_us, 3), round(cpu_us, 3), missed)


_NO_LATE: dict[str, Any] = {"defer_cpu_below": 0.0, "defer_layers": (), "defer_below_profile": None}


def wait_at_once(program: Program, frame: Frame) -> Program:
    """Every layer waits for its CPU rows right behind its ring: nothing overlaps."""
    steps = list(program.steps)
    for step in [s for s in steps if s.name in WAITS]:
        steps.remove(step)
        ring = next(i for i, s in enumerate(steps) if s.id == f"host:{step.layer}")
        steps.insert(ring + 1, step)
    return program.edited(steps)
