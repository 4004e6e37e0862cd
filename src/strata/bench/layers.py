"""Where a window's time goes, layer by layer, and what deferral could gain.

    m  the mixer half of a layer      f  the fast side's experts: shared and cached ones
    c  the CPU pool on the layer's    wait  what the window waits for the pool
       rows, hand-over included       rest  read, router, plan, hand-over, combine, write

What deferral could gain is worked out from them in ``bench/gains.py``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.bench.arms import with_steps
from strata.core.types import Place
from strata.engine.engine import Engine
from strata.engine.window_times import CPU_PART, wait_at_once
from strata.experts.service import ExpertService
from strata.memory.frame import Frame
from strata.models.spec import ModelSpec
from strata.window.program import Program, Step
from strata.window.run import WindowRunner
from strata.window.stamps import (
    FAST_SIDE,
    LATE_SIDE,
    WAITS,
    EventClock,
    HostClock,
    StepTimes,
    coarse,
    layer_kind,
)

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds a window of one layer. late_ms: what deferral and repair add (joins, corrected
    reads, state written again)."""

    layer: int
    kind: str
    mixer_ms: float
    fast_ms: float
    cpu_ms: float
    wait_ms: float
    rest_ms: float
    late_ms: float = 0.0


@dataclass(frozen=True)
class WindowTime:
    """All layers of a window, and what lies outside of them."""

    layers: tuple[LayerTime, ...]
    outside_ms: float

    @property
    def total_ms(self) -> float:
        """Of the window with its waits, without the CPU's own time."""
        return self.outside_ms + sum(
            t.mixer_ms + t.fast_ms + t.wait_ms + t.rest_ms + t.late_ms for t in self.layers
        )


def time_layers(engine: Engine, variant: Any, run: Callable[[Any], object]) -> WindowTime:
    """Measure a variant; ``run`` makes windows of the variant that it is given.

    Windows are run twice: once as they are for m, f and waits, once with every layer waiting for
    the pool at its ring for c.
    """
    runner = engine.runner
    number = next(_NUMBERS)  # windows are kept by their variant's name
    if isinstance(runner, WindowRunner):
        times, pool = StepTimes(engine.spec), PoolTimes(engine.service)
        run(with_steps(variant, f"{variant.name} timed {number}", times))
        run(with_steps(variant, f"{variant.name} in turn {number}", pool))
        return _window_time(engine.spec, times, pool.ms)
    clock = EventClock if runner.network.device.type == "cuda" else HostClock
    times, in_turn = (StepTimes(engine.spec, clock, part_of=coarse) for _ in range(2))
    with told(runner, times.ended):
        run(with_steps(variant, f"{variant.name} timed {number}", times))
    with told(runner, in_turn.ended):
        run(with_steps(variant, f"{variant.name} in turn {number}", wait_at_once, in_turn))
    return _window_time(engine.spec, times, lambda layer: in_turn.layer_ms(layer, CPU_PART))


@contextmanager
def told(runner: Any, ended: Callable[[int], object]) -> Iterator[None]:
    """A runner that tells the size of every window that it ran."""
    run = runner.run

    def told(recorded: Any, tokens: Sequence[int]) -> Any:
        logits = run(recorded, tokens)
        if hasattr(recorded, "frame"):  # a chunk of a prompt has none
            ended(recorded.frame.T)
        return logits

    runner.run = told
    try:
        yield
    finally:
        del runner.run


def _window_time(spec: ModelSpec, times: StepTimes, cpu_ms: Callable[[int], float]) -> WindowTime:
    times.fold()
    layers = []
    for layer in range(spec.n_layers):
        mixer = times.mixer_ms(layer)
        fast, wait, late = (times.layer_ms(layer, n) for n in (FAST_SIDE, WAITS, LATE_SIDE))
        rest = times.layer_ms(layer) - mixer - fast - wait - late
        kind, cpu = layer_kind(spec, layer), cpu_ms(layer)
        layers.append(LayerTime(layer, kind, mixer, fast, cpu, wait, rest, late))
    return WindowTime(tuple(layers), times.outside_ms())


class PoolTimes:
    """The CPU pool's own time in each layer: from the ring until all rows are there, with nothing
    else running. A window transformation on the CPU; on a device the host's answers are timed."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._seconds: dict[int, list[float]] = {}

    def ms(self, layer: int, quantile: float = 0.5) -> float:
        """Milliseconds in a window: the median, or another quantile."""
        seconds = self._seconds.get(layer)
        return 1e3 * float(np.quantile(seconds, quantile)) if seconds else 0.0

    def _note(self, layer: int, seconds: float) -> None:
        self._seconds.setdefault(layer, []).append(seconds)

    def __call__(self, program: Program, frame: Frame, *_: object) -> Program:
        """The program that waits for the pool right at every ring."""
        return program.edited(self._in_turn(step) if step.rings else step for step in program.steps)

    def _in_turn(self, step: Step) -> Step:
        service, launch = self._service, step.launch
        assert isinstance(service, ExpertService)

        def run() -> None:
            start = time.perf_counter()
            launch()
            for place in (Place.CPU, Place.CPU_LATE):
                service.wait(step.layer, place)
            self._note(step.layer, time.perf_counter() - start)

        return replace(step, launch=run)

    def watch_host(self, run: Callable[[], object]) -> None:
        """Time every answer that the host gives while ``run`` makes windows; its native loop, which
        has no clock, rests."""
        service = self._service
        serve, native = service.serve, service._server
        service.answer_in_python()

        def timed(layer: int, *rest: Any) -> None:
            start = time.perf_counter()
            serve(layer, *rest)
            self._note(layer, time.perf_counter() - start)

        service.serve = timed
        try:
            run()
        finally:
            del service.serve
            service._server = native


def layer_lines(window: WindowTime) -> list[str]:
    """A table of the kinds of layers, means over the layers of a kind, and the sums."""
    lines = [f"{'layers':<30} {'n':>3} {'m':>8} {'f':>8} {'c':>8} {'wait':>8} {'rest':>8} "
             f"{'late':>8}  ms"]  # fmt: skip
    kinds: dict[str, list[LayerTime]] = {}
    for t in window.layers:
        kinds.setdefault(t.kind, []).append(t)
    for kind, group in kinds.items():
        means = (
            sum(getattr(t, name) for t in group) / len(group)
            for name in (
                "mixer_ms",
                "fast_ms",
                "cpu_ms",
                "wait_ms",
                "rest_ms",
                "late_ms",
            )  # fmt: skip
        )
        lines.append(f"{kind:<30} {len(group):>3} " + " ".join(f"{x:>8.3f}" for x in means))
    cpu = sum(t.cpu_ms for t in window.layers)
    lines.append(
        f"a window: {window.total_ms:.2f} ms with its waits (embedding and head "
        f"{window.outside_ms:.2f}); the CPU pool alone {cpu:.2f}"
    )
    return lines
