"""Where a window's time goes, layer by layer, and what deferral could gain.

    m  the mixer half of a layer      f  the fast side after routing: cached experts, shared expert,
    c  the CPU pool on the layer's       combine, write
       rows                           wait  what the window waits for the pool

With deferral the pool of layer l works while the mixer of layer l + 1 runs, so a layer gains
min(m of the next layer, max(0, c - f)); where some rows stay on time, c_on_time of the pool's work,
min(m, max(0, c - max(f, c_on_time))). On the CPU alone both sides share the cores: the formula
describes a machine with a GPU, and the gain here is none.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.bench.arms import with_steps
from strata.bench.routing import moe_layers
from strata.core.types import Place
from strata.engine.engine import Engine
from strata.experts.service import ExpertService
from strata.memory.frame import Frame
from strata.models.spec import ModelSpec
from strata.window.program import Program, Step
from strata.window.run import WindowRunner
from strata.window.stamps import FAST_SIDE, WAITS, EventClock, HostClock, StepTimes, layer_kind

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds a window of one layer. rest_ms: read, router, plan and hand-over."""

    layer: int
    kind: str
    mixer_ms: float
    fast_ms: float
    cpu_ms: float
    wait_ms: float
    rest_ms: float
    on_time: float = 0.0
    """Share of the CPU's rows that are not late, where some are."""

    def gain_ms(self, next_mixer_ms: float) -> float:
        """What deferral of all or (with on_time) some rows could gain here."""
        held = max(self.fast_ms, self.cpu_ms * self.on_time)
        return min(next_mixer_ms, max(0.0, self.cpu_ms - held))


@dataclass(frozen=True)
class WindowTime:
    """All layers of a window, and what lies outside of them."""

    layers: tuple[LayerTime, ...]
    outside_ms: float

    @property
    def total_ms(self) -> float:
        """Of the window with its waits, without the CPU's own time."""
        return self.outside_ms + sum(
            t.mixer_ms + t.fast_ms + t.wait_ms + t.rest_ms for t in self.layers
        )

    def gain_ms(self, late: Sequence[int]) -> float:
        """What deferral of these layers could gain in a window."""
        mixer = {t.layer: t.mixer_ms for t in self.layers}
        return sum(t.gain_ms(mixer.get(t.layer + 1, 0.0)) for t in self.layers if t.layer in late)


def time_layers(
    engine: Engine, variant: Any, run: Callable[[Any], object], on_time: float = 0.0
) -> WindowTime:
    """Measure a variant; ``run`` makes windows of the variant that it is given.

    Windows are run twice: once as they are for m, f and waits, once with every layer waiting for
    the pool at its ring for c.
    """
    runner = engine.runner
    own = isinstance(runner, WindowRunner)
    compiled = runner.network.device.type == "cuda"
    times = StepTimes(engine.spec, EventClock if compiled else HostClock)
    number = next(_NUMBERS)  # windows are kept by their variant's name
    pool = PoolTimes(engine.service)
    with _told(runner, times) if compiled else nullcontext():
        run(with_steps(variant, f"{variant.name} timed {number}", times))
    if own:
        run(with_steps(variant, f"{variant.name} in turn {number}", pool))
    else:
        pool.watch_host(lambda: run(variant))
    return _window_time(engine.spec, times, pool, on_time)


@contextmanager
def _told(runner: Any, times: StepTimes) -> Iterator[None]:
    """A runner that tells the times of every window that it replayed."""
    run = runner.run

    def told(recorded: Any, tokens: Sequence[int]) -> Any:
        logits = run(recorded, tokens)
        if hasattr(recorded, "frame"):  # a chunk of a prompt has none
            times.ended(recorded.frame.T)
        return logits

    runner.run = told
    try:
        yield
    finally:
        del runner.run


def _window_time(spec: ModelSpec, times: StepTimes, pool: PoolTimes, on_time: float) -> WindowTime:
    times.fold()
    layers = []
    for layer in range(spec.n_layers):
        mixer, fast = times.mixer_ms(layer), times.layer_ms(layer, FAST_SIDE)
        wait = times.layer_ms(layer, WAITS)
        rest = times.layer_ms(layer) - mixer - fast - wait
        kind = layer_kind(spec, layer)
        cpu = pool.ms(layer)
        layers.append(LayerTime(layer, kind, mixer, fast, cpu, wait, rest, on_time))
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
    lines = [f"{'layers':<30} {'n':>3} {'m':>8} {'f':>8} {'c':>8} {'wait':>8} {'rest':>8}  ms"]
    kinds: dict[str, list[LayerTime]] = {}
    for t in window.layers:
        kinds.setdefault(t.kind, []).append(t)
    for kind, group in kinds.items():
        means = (
            sum(getattr(t, name) for t in group) / len(group)
            for name in ("mixer_ms", "fast_ms", "cpu_ms", "wait_ms", "rest_ms")
        )
        lines.append(f"{kind:<30} {len(group):>3} " + " ".join(f"{x:>8.3f}" for x in means))
    cpu = sum(t.cpu_ms for t in window.layers)
    lines.append(
        f"a window: {window.total_ms:.2f} ms with its waits (embedding and head "
        f"{window.outside_ms:.2f}); the CPU pool alone {cpu:.2f}"
    )
    return lines


def late_layers(spec: ModelSpec) -> list[int]:
    """Layers that deferral can move: not the last, none in front of an n-gram block."""
    return [
        layer
        for layer in moe_layers(spec)
        if layer + 1 < spec.n_layers and spec.layers[layer + 1].ngram is None
    ]
