"""Time of every step of a window, by step name, layers of each mixer apart.

``StepTimes`` is a window transformation: every step is followed by a stamp of its clock, and an
interval is a stamp less the one before it. The clock says what a stamp is: on the CPU the host's
time; for a graph, whatever its recorder can make into a node (an event) — a device gives its own
``StepClock`` and nothing else changes. Put it last, behind the features that move steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.memory.frame import Frame
from strata.models.spec import AttentionSpec, GdnSpec, MixerSpec, ModelSpec, MoeSpec
from strata.window.program import Program, Step

MIXER_SIDE = ("ngram", "attn_read", "attn_write")
"""Steps of a layer's mixer half besides the mixer's own."""
FFN_SIDE = (
    "ffn_read", "router", "plan", "publish", "ring", "shared_expert", "gpu_rows", "wait_cpu",
    "add_cpu_rows", "combine", "ffn_write", "wait_late", "late_join", "dense_ffn", "correct",
    "repair",
)  # fmt: skip
WAITS = ("wait_cpu", "wait_late")
FAST_SIDE = ("shared_expert", "gpu_rows")
"""What the device does while the host computes rows of the same layer."""
BEHIND = ("add_cpu_rows", "combine", "ffn_write")
"""What stands behind the layer's rows, and waits for those of the host that are on time."""
LATE_SIDE = ("late_join", "correct", "repair")
"""What deferral and repair add."""


def coarse(name: str) -> str:
    """One name for each part of a layer, for stamps only where parts meet: every other stamp would
    be counted to its part, at the price of a short kernel."""
    if name in FAST_SIDE:
        return "gpu_rows"
    if name in BEHIND:
        return "combine"
    if name in (*WAITS, *LATE_SIDE, "ring", "embed"):
        return name
    return "router" if name in FFN_SIDE else "attn_read"


class StepClock(Protocol):
    """Stamps of one window. ``stamp(0)`` is its beginning."""

    recorded: bool
    """Whether stamps are nodes of a graph, so that ``stamp`` runs when it is recorded and not when
    it is replayed: ``StepTimes.ended`` must be told then."""

    def stamp(self, i: int) -> None:
        """Note the time; called where the window runs or is recorded."""
        ...

    def seconds(self) -> npt.NDArray[np.float64]:
        """All stamps of the window that ended last, [n]; called between windows."""
        ...


class HostClock:
    """Stamps by the host's own clock: right where steps run one after another on the CPU."""

    recorded = False

    def __init__(self, n: int) -> None:
        self._at = np.zeros(n)

    def stamp(self, i: int) -> None:
        """Note the time."""
        self._at[i] = time.perf_counter()

    def seconds(self) -> npt.NDArray[np.float64]:
        """The stamps."""
        return self._at


class EventClock:
    """Stamps by events of a CUDA stream, which graphs record as nodes."""

    recorded = True

    def __init__(self, n: int) -> None:
        make = partial(torch.cuda.Event, enable_timing=True, external=True)
        self._events = [make() for _ in range(n)]

    def stamp(self, i: int) -> None:
        """Record the event."""
        self._events[i].record(torch.cuda.current_stream())

    def seconds(self) -> npt.NDArray[np.float64]:
        """The stamps of the last replay, after the first one; the stream must be done."""
        first = self._events[0]
        return np.array([first.elapsed_time(event) for event in self._events]) / 1e3


@dataclass
class _Stamped:
    steps: tuple[tuple[str, int], ...]
    clock: StepClock
    n_tokens: int
    fresh: bool = False


@dataclass
class StepTimes:
    """Seconds by (step name, layer), summed over the windows since ``clear``.

    part_of: names for steps; neighbours of a layer with one name are timed as one (``coarse``).
    """

    spec: ModelSpec
    make_clock: Callable[[int], StepClock] = HostClock
    part_of: Callable[[str], str] = str
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    n_windows: int = 0
    _stamped: list[_Stamped] = field(default_factory=list)

    def __call__(self, program: Program, frame: Frame) -> Program:
        """The program with a stamp behind every step."""
        own = [step for step in program.steps if step.stream == "main"]
        keys = [(self.part_of(step.name), step.layer) for step in own]
        # a part ends where the next step is of another one
        ends = [i for i, key in enumerate(keys) if keys[i + 1 : i + 2] != [key]]
        clock = self.make_clock(len(ends) + 1)
        window = _Stamped(tuple(keys[i] for i in ends), clock, program.n_tokens)
        self._stamped.append(window)
        number = {own[i].id: n + 1 for n, i in enumerate(ends)}
        stamped = {own[0].id, *number}
        return program.edited(
            self._followed(step, window, step is own[0], number.get(step.id))
            if step.id in stamped
            else step
            for step in program.steps
        )

    def _followed(self, step: Step, window: _Stamped, first: bool, i: int | None) -> Step:
        launch, stamp = step.launch, window.clock.stamp

        def run() -> None:
            if first:
                if not window.clock.recorded:
                    self.fold()
                    window.fresh = True
                stamp(0)
            launch()
            if i is not None:
                stamp(i)

        return replace(step, launch=run)

    def ended(self, n_tokens: int) -> None:
        """A recorded window of so many tokens was replayed: its stamps are new."""
        for window in self._stamped[::-1]:
            if window.n_tokens == n_tokens:
                window.fresh = True
                break
        self.fold()

    def fold(self) -> None:
        """Add the window that ended last to the sums."""
        for window in self._stamped:
            if not window.fresh:
                continue
            window.fresh = False
            self.n_windows += 1
            spent = np.diff(window.clock.seconds())
            for key, s in zip(window.steps, spent.tolist(), strict=True):
                # a stamp that is missing or runs backwards adds nothing
                self.seconds[key] = self.seconds.get(key, 0.0) + max(s, 0.0)

    def clear(self) -> None:
        """Forget everything measured."""
        self.fold()
        self.seconds.clear()
        self.n_windows = 0

    def line(self) -> str:
        """Milliseconds per window by step name, layers of each mixer apart, on one line."""
        self.fold()
        if not self.n_windows:
            return "verify profile: no window has run"
        parts, total = [], 0.0
        groups: dict[str, dict[str, float]] = {}
        for (name, layer), s in self.seconds.items():
            ms = 1e3 * s / self.n_windows
            total += ms
            of = groups.setdefault(self._kind(layer, name), {})
            of[name] = of.get(name, 0.0) + ms
        for kind, names in groups.items():
            parts.append(f"{kind}: " + ", ".join(f"{n} {ms:.3f} ms" for n, ms in names.items()))
        parts.append(f"total {total:.3f} ms/window over {self.n_windows} windows")
        return " | ".join(parts)

    def _kind(self, layer: int, name: str) -> str:
        if name == "embed" or layer >= self.spec.n_layers:
            return "embedding and head"
        return f"{mixer_kind(self.spec.layers[layer].mixer)} layers"

    def layer_ms(self, layer: int, names: Sequence[str] | None = None) -> float:
        """Milliseconds a window of a layer's steps, of those named or of all."""
        self.fold()
        chosen = (
            s
            for (name, at), s in self.seconds.items()
            if at == layer and (name in names if names is not None else name != "embed")
        )
        return 1e3 * sum(chosen) / max(self.n_windows, 1)

    def mixer_ms(self, layer: int) -> float:
        """m: the mixer half of a layer, milliseconds a window."""
        return self.layer_ms(layer) - self.layer_ms(layer, FFN_SIDE)

    def outside_ms(self) -> float:
        """Embedding and head, milliseconds a window."""
        layers = range(self.spec.n_layers)
        self.fold()
        whole = 1e3 * sum(self.seconds.values()) / max(self.n_windows, 1)
        return whole - sum(self.layer_ms(layer) for layer in layers)


def mixer_kind(mixer: MixerSpec) -> str:
    """The name of a mixer in reports."""
    if isinstance(mixer, GdnSpec):
        return "GDN"
    if isinstance(mixer, AttentionSpec):
        return "QSA" if mixer.indexer is not None else "attention"
    return "MLA"


def layer_kind(spec: ModelSpec, layer: int) -> str:
    """Mixer and feed-forward of a layer, in words: layers of a kind take the same time but for
    their weight types."""
    entry = spec.layers[layer]
    ffn = "experts" if isinstance(entry.ffn, MoeSpec) else "dense"
    ngram = " and n-grams" if entry.ngram is not None else ""
    return f"{mixer_kind(entry.mixer)}{ngram}, {ffn}"
