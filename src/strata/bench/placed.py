"""How fast a model will answer on a GPU, said before it is loaded, for any size of its fast tier.

Two slices of the model (``bench/slices.py``) run with all their experts in VRAM: what the larger
one takes more is the time of its additional layers, and the layers behind repeat them. Then the
larger one runs with as many of its experts resident as a token will find in the model's fast tier;
CPU, link, hand-over and the PCIe share are the engine's own. What that adds is carried on to all
layers by their experts' bytes:

    T = G + E,   G = T_a + (T_b - T_a) (L - a) / (b - a),   E = (T_b(hits) - T_b) bytes_L / bytes_b
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from strata.bench.arms import with_steps
from strata.bench.machine import Bandwidths, measure_bandwidths
from strata.bench.made_up_state import fill_state
from strata.bench.predict import Prediction, SliceTime, expected_hits, load_slice, predict
from strata.bench.prompts import random_prompt
from strata.bench.routing import Locality, Replay, made_up_trace, moe_layers
from strata.bench.slices import depths
from strata.bench.sweep import Slots, share_rests
from strata.bench.traffic import traffic_of
from strata.core.settings_load import Effective
from strata.engine.build import Ready, build
from strata.engine.engine import Engine
from strata.models.spec import ModelSpec, MoeSpec

AT = 256
"""Tokens in front of the windows that are timed."""
WARM, TIMED, TURNS, MOST_SETTLING = 3, 8, 8, 320


@dataclass(frozen=True)
class Asked:
    """What is predicted: for which sizes of the fast tier, on which kind of text, behind how many
    tokens. check: path of the model, to load and measure it too."""

    slots: Sequence[int]
    locality: Locality
    at: int = AT
    check: str | None = None


def forecast(
    ready: Ready, asked: Effective, wanted: Asked, say: Callable[[str], None]
) -> list[Prediction]:
    """A prediction for each size; on the CPU alone, where there are no sizes, one (``predict``).
    The checkpoint must be open. UnsupportedError when it cannot be sliced."""
    if ready.settings.device != "cuda":
        return [predict(ready, asked, wanted.locality, say, wanted.check)]
    bandwidths = measure_bandwidths(ready.settings.workers, "cuda")
    say(bandwidths.line())
    found = _on_slices(ready, asked, wanted, bandwidths)
    if wanted.check is not None:
        found = [_checked(p, ready, asked, wanted) for p in found]
    return found


def _on_slices(
    ready: Ready, asked: Effective, wanted: Asked, bandwidths: Bandwidths
) -> list[Prediction]:
    spec, routed = ready.plan.spec, traffic_of(ready.plan).routed_bytes
    a, b = depths(spec)
    context = min(spec.max_context_tokens, wanted.at + MOST_SETTLING)
    given = {"context": context, "pcie_frac": ready.settings.pcie_frac}
    with ExitStack() as stack:
        made = []
        for n in dict.fromkeys((a, b)):
            engine = load_slice(ready, asked, n, given)[0]
            stack.callback(engine.close)
            made.append(Windows(engine, wanted.locality, wanted.at))
        small, large = made[0], made[-1]
        for _ in range(TURNS):
            for windows in made:
                windows.turn()
        base = small.take()
        more = large.take() if large is not small else base
        per_layer = (more - base) / (b - a) if b > a else 0.0
        fixed = base + max(per_layer, 0.0) * (spec.n_layers - a)
        found = []
        for slots in wanted.slots:
            hits, extra = expected_hits(ready, wanted.locality, slots), 0.0
            if hits < 1:
                large.keep(hits)
                extra = max(0.0, large.take() - more) * _bytes(ready, spec.n_layers)
                extra /= max(1, _bytes(ready, b))
            missed = routed * (1 - hits)
            found.append(Prediction(
                fixed, missed, 0.0, missed / extra if extra else bandwidths.both, bandwidths, hits,
                (SliceTime(a, base, 0.0, 0.0), SliceTime(b, more, 0.0, 0.0)), placed_s=extra,
            ))  # fmt: skip
        return found


def _bytes(ready: Ready, n_layers: int) -> int:
    """Expert bytes of a token in the first layers, as they will lie in RAM."""
    total = 0
    for entry, layer in zip(ready.plan.shapes[:n_layers], ready.plan.spec.layers, strict=False):
        if entry is not None and isinstance(layer.ffn, MoeSpec):
            total += entry[0].blob_bytes * layer.ffn.n_active
    return total


def _checked(found: Prediction, ready: Ready, asked: Effective, wanted: Asked) -> Prediction:
    assert wanted.check is not None
    engine = build(wanted.check, asked)
    try:
        windows = Windows(engine, wanted.locality, wanted.at)
        windows.settle()
        for _ in range(TURNS):
            windows.turn()
        return found.beside(SliceTime(ready.plan.spec.n_layers, windows.take(), 0.0, 0.0))
    finally:
        engine.close()


class Windows:
    """Windows of one token of an engine on a device, behind a made-up state of ``at`` tokens."""

    def __init__(self, engine: Engine, locality: Locality, at: int) -> None:
        self._engine, self._slots = engine, Slots(engine)
        self._at = max(1, min(at, engine.context_tokens - WARM - TIMED - 1))
        self._prompt = random_prompt(self._at, engine.n_vocab, 0)
        self._replay = _replay(engine.spec, engine, locality)
        self._usual = engine.runner.variant
        if self._replay is not None:
            self._usual = with_steps(self._usual, "traced", self._replay)
        self._seconds: list[float] = []
        self._begin()

    def keep(self, hits: float) -> None:
        """So large a part of the experts stays resident; measured anew."""
        self._slots.resize(round(hits * self._slots.n_pairs))
        self.settle()
        for _ in range(TURNS):
            self.turn()

    def settle(self) -> None:
        """Until the PCIe share has been found, where one is sought."""
        for _ in range(0, MOST_SETTLING, TIMED):
            self._run(TIMED)
            if share_rests(self._engine, 1):
                return

    def turn(self) -> None:
        """A few windows that count."""
        self._run(WARM)
        self._seconds += self._run(TIMED)

    def take(self) -> float:
        """Seconds of a window, the median of those that counted; they are forgotten."""
        found = statistics.median(self._seconds)
        self._seconds.clear()
        return found

    def _begin(self) -> None:
        fill_state(self._engine.state, self._prompt)

    def _run(self, n: int) -> list[float]:
        engine, found = self._engine, []
        engine.runner.variant = self._usual
        if engine.length + n + 1 > engine.context_tokens:
            self._begin()
        for _ in range(n):
            if self._replay is not None:
                self._replay.seek(engine.length)
            start = time.perf_counter()
            engine.verify([self._prompt[0]])
            engine.commit(1)
            found.append(time.perf_counter() - start)
        return found


def _replay(spec: ModelSpec, engine: Engine, locality: Locality) -> Replay | None:
    layers = moe_layers(spec)
    if not layers:
        return None
    ffn = spec.layers[layers[0]].ffn
    assert isinstance(ffn, MoeSpec)
    trace = made_up_trace(len(layers), ffn.n_experts, ffn.n_active, 256, locality)
    return Replay(spec, trace, engine.runner.network.device)
