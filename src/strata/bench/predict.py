"""How fast a model will answer, said before it is loaded: the serial law

    T = G + max( CPU bytes / B_cpu, link bytes / B_link, (CPU bytes + link bytes) / B_both )

for a window of one token. G is the time of a window without the experts that are not in the fast
tier. It is measured on two slices of the model (``bench/slices.py``) that differ by one period of
its layers; layers behind only repeat it. B_cpu is what the pool makes of the model's own expert
bytes, B_link and B_both are measured. Law: literature on hybrid inference, see docs/DETAILS.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from strata.bench.arms import with_steps
from strata.bench.layers import PoolTimes
from strata.bench.machine import Bandwidths, measure_bandwidths
from strata.bench.prompts import random_prompt
from strata.bench.routing import Locality, Replay, made_up_trace, moe_layers
from strata.bench.slices import depths, slice_of
from strata.bench.traffic import Traffic, traffic_of
from strata.core.settings import SETTINGS
from strata.core.settings_load import Effective
from strata.engine.build import Ready, build
from strata.engine.checkpoint_plan import understand
from strata.engine.engine import Engine
from strata.experts.store import stride_of
from strata.memory.budget import GIB
from strata.models.spec import ModelSpec, MoeSpec
from strata.window.run import WindowRunner

PROMPT_TOKENS, CONTEXT = 64, 512
WARM, TIMED, TURNS = 2, 4, 12
QUANTILE = 0.25


@dataclass(frozen=True)
class SliceTime:
    """A slice as measured: milliseconds of a window, of the pool in it, and the expert bytes."""

    n_layers: int
    window_s: float
    pool_s: float
    expert_bytes: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of a window of one token, and what they are made of."""

    fixed_s: float
    host_bytes: float
    link_share: float
    pool_bytes_s: float
    bandwidths: Bandwidths
    hit_rate: float
    slices: tuple[SliceTime, SliceTime]
    measured: SliceTime | None = None
    """The model itself, where it was loaded to check."""
    placed_s: float | None = None
    """The second term where it was measured as a whole (``bench/placed.py``)."""

    def beside(self, measured: SliceTime) -> Prediction:
        """With what the model itself took."""
        return replace(self, measured=measured)

    @property
    def host_s(self) -> float:
        """The law's second term."""
        if self.placed_s is not None:
            return self.placed_s
        link = self.host_bytes * self.link_share
        cpu = self.host_bytes - link
        terms = [cpu / self.pool_bytes_s if cpu else 0.0]
        if link:
            terms += [link / self.bandwidths.link, self.host_bytes / self.bandwidths.both]
        return max(terms)

    @property
    def window_s(self) -> float:
        """T."""
        return self.fixed_s + self.host_s

    @property
    def tokens_s(self) -> float:
        """Tokens a second without drafts."""
        return 1 / self.window_s

    def lines(self) -> list[str]:
        """For people."""
        a, b = self.slices
        lines = [
            f"predicted: {self.tokens_s:.1f} tok/s in windows of one token = "
            f"{1e3 * self.fixed_s:.2f} ms + {1e3 * self.host_s:.2f} ms for "
            f"{self.host_bytes / 1e9:.3f} GB of experts outside the fast tier"
        ]
        if self.host_bytes:
            lines.append(
                f"  {'the pool makes' if self.placed_s is None else 'CPU and link make'} "
                f"{self.pool_bytes_s / 1e9:.2f} GB/s of these experts; "
                f"{self.hit_rate:.0%} of a token's experts are in the fast tier"
            )
        lines.append(
            f"  measured on {a.n_layers} and {b.n_layers} layers with made-up weights: "
            f"{1e3 * a.window_s:.2f} and {1e3 * b.window_s:.2f} ms; drafts and a long context "
            f"change it"
        )
        if self.measured is not None:
            seconds = self.measured.window_s
            lines.append(
                f"measured: {1 / seconds:.1f} tok/s, {1e3 * seconds:.2f} ms a window; the "
                f"prediction is {self.window_s / seconds - 1:+.1%} of that time off"
            )
        return lines


def predict(
    ready: Ready,
    asked: Effective,
    locality: Locality,
    say: Callable[[str], None],
    check: str | None = None,
) -> Prediction:
    """Predict for a model on the CPU that was understood. Its checkpoint must be open.

    check: path of the model, to load and measure it too, taking turns with the slices.
    UnsupportedError when it cannot be sliced.
    """
    spec, settings = ready.plan.spec, ready.settings
    bandwidths = measure_bandwidths(settings.workers, settings.device)
    say(bandwidths.line())
    first, second = depths(spec)
    small, large, *whole = _time_slices(ready, asked, (first, second), locality, check)
    pool = large.expert_bytes / large.pool_s if large.pool_s else bandwidths.host
    return Prediction(
        _fixed(spec, small, large, pool), float(traffic_of(ready.plan).routed_bytes), 0.0, pool,
        bandwidths, 0.0, (small, large), whole[0] if whole else None,
    )  # fmt: skip


def _fixed(spec: ModelSpec, small: SliceTime, large: SliceTime, pool: float) -> float:
    """G: windows of both slices without their experts, carried on to all layers."""
    base = small.window_s - small.expert_bytes / pool
    period = large.n_layers - small.n_layers
    if not period:
        return base
    step = large.window_s - large.expert_bytes / pool - base
    return base + max(step, 0.0) * (spec.n_layers - small.n_layers) / period


def _time_slices(
    ready: Ready,
    asked: Effective,
    depths: tuple[int, int],
    locality: Locality,
    check: str | None,
) -> list[SliceTime]:
    """Both slices, and the model when it is checked, taking turns: what else the machine does meets
    all alike."""
    with ExitStack() as stack:
        made = []
        for n in depths:
            made.append(SliceWindows(*load_slice(ready, asked, n, {}), locality))
            stack.callback(made[-1].engine.close)
        if check is not None:
            made.append(SliceWindows(build(check, asked), traffic_of(ready.plan), locality))
            stack.callback(made[-1].engine.close)
        for _ in range(min(TURNS, *(windows.room for windows in made))):
            for windows in made:
                windows.whole()
            for windows in made:
                windows.in_turn()
        return [windows.time() for windows in made]


def load_slice(
    ready: Ready, asked: Effective, n_layers: int, given: Mapping[str, Any]
) -> tuple[Engine, Traffic]:
    """An engine over the first layers, on a GPU with all of its experts in VRAM. given: settings
    that it has besides."""
    spec, settings = ready.plan.spec, ready.settings
    checkpoint = slice_of(ready.plan.checkpoint, spec, n_layers)
    tiles = any(e is not None and "tiles" in e[0].layouts for e in ready.plan.shapes)
    of = understand(checkpoint)
    changes: dict[str, Any] = {
        "context": min(CONTEXT, spec.max_context_tokens), "expert_profile": None, "pack": None,
        "expert_cache": of.n_pairs if settings.device == "cuda" else 0, "experts_on_disk": False,
        "pcie_frac": 0.0, "logpos": None, "adapt_swaps": 0, "device": settings.device,
        "expert_layout": "tiles" if tiles else "native", **given,
    }  # fmt: skip
    if not ready.plan.n_pairs:
        changes["expert_layout"] = "auto"
    slim = Effective(replace(asked.settings, **changes), asked.sources)
    # build opens whatever names a model; an open checkpoint names itself
    return build(cast(Path, checkpoint), slim), traffic_of(of)


class SliceWindows:
    """Windows of one token on a slice: as they are, and with the pool's part timed."""

    def __init__(self, engine: Engine, traffic: Traffic, locality: Locality) -> None:
        self.engine, self._traffic = engine, traffic
        self._layers = moe_layers(engine.spec)
        self._variant = self._timed = engine.runner.variant
        self._replay: Replay | None = None
        self._seconds: list[float] = []
        self._pool = PoolTimes(engine.service)
        if self._layers:
            ffn = engine.spec.layers[self._layers[0]].ffn
            assert isinstance(ffn, MoeSpec)
            trace = made_up_trace(len(self._layers), ffn.n_experts, ffn.n_active, 256, locality)
            self._replay = Replay(engine.spec, trace, engine.runner.network.device)
            self._variant = with_steps(self._variant, "traced", self._replay)
            self._timed = with_steps(self._variant, "in turn", self._pool)
        n_prompt = min(PROMPT_TOKENS, engine.context_tokens // 4)
        row = engine.read_prompt(random_prompt(n_prompt, engine.n_vocab, 0))
        self._token = int(np.argmax(row))
        self._windows(WARM)

    @property
    def room(self) -> int:
        """Turns that the context holds."""
        left = self.engine.context_tokens - self.engine.length
        return max(1, left // (WARM + 2 * TIMED))

    def whole(self) -> None:
        """A turn of windows as they are."""
        self.engine.runner.variant = self._variant
        self._windows(WARM)
        self._seconds += self._windows(TIMED)

    def in_turn(self) -> None:
        """A turn for the pool's part."""
        if isinstance(self.engine.runner, WindowRunner):
            self.engine.runner.variant = self._timed
            self._windows(TIMED)
        else:
            self._pool.watch_host(lambda: self._windows(TIMED))

    def time(self) -> SliceTime:
        """What was measured. The faster half counts: others use the machine too."""
        pool = sum(self._pool.ms(layer, QUANTILE) for layer in self._layers) / 1e3
        window = float(np.quantile(self._seconds, QUANTILE))
        n_bytes = float(self._traffic.routed_bytes) if pool else 0.0
        return SliceTime(self.engine.spec.n_layers, window, pool, n_bytes)

    def _windows(self, n: int) -> list[float]:
        found = []
        for _ in range(n):
            if self._replay is not None:
                self._replay.seek(self.engine.length)
            start = time.perf_counter()
            self.engine.verify([self._token])
            self.engine.commit(1)
            found.append(time.perf_counter() - start)
        return found


def planned_slots(ready: Ready) -> int:
    """Experts that the fast tier will hold; auto is what the GPU's free memory leaves room for."""
    pairs, asked = ready.plan.n_pairs, ready.settings.expert_cache
    if asked != SETTINGS["expert_cache"].auto:
        return min(asked, pairs)
    strides = [stride_of(entry[0]) for entry in ready.plan.shapes if entry is not None]
    if ready.settings.device != "cuda" or not strides:
        return 0
    free = int(torch.cuda.mem_get_info()[0])
    if ready.settings.vram_gb:
        free = min(free, int(ready.settings.vram_gb * GIB))
    others = sum(
        line.n_bytes
        for line in ready.memory.entries
        if line.tier == "vram" and not line.owner.startswith("fast tier")
    )
    return max(0, min(pairs, (free - others - GIB) // max(strides)))


def expected_hits(ready: Ready, locality: Locality, slots: int) -> float:
    """Share of a token's experts in a fast tier of so many slots. Filled evenly, it is their share
    of all experts; a profile or an adaptive cache knows what a text used before, and is judged by
    what it uses next."""
    settings, spec = ready.settings, ready.plan.spec
    layers, pairs = moe_layers(spec), ready.plan.n_pairs
    if slots <= 0 or not layers:
        return 0.0
    if slots >= pairs:
        return 1.0
    if settings.expert_profile is None and not settings.adapt_swaps:
        return slots / pairs
    ffn = spec.layers[layers[0]].ffn
    assert isinstance(ffn, MoeSpec)
    trace = made_up_trace(4, ffn.n_experts, ffn.n_active, 1024, locality)
    half, per_layer = trace.shape[1] // 2, round(slots / pairs * ffn.n_experts)
    shares = []
    for layer in trace:
        uses = np.bincount(layer[:half].reshape(-1), minlength=ffn.n_experts)
        held = np.argsort(-uses, kind="stable")[:per_layer]
        shares.append(np.isin(layer[half:], held).mean())
    return float(np.mean(shares))
