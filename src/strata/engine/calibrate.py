"""Works ``--defer-cpu-below auto`` out when an engine starts: times of a few plain windows, or a
stored profile of them, become one threshold per window size.

Measured: eager windows of built-in text in which every layer waits for its CPU rows at once, so
that mixers, the fast tier's part and the CPU's part do not overlap. A device hands its own times in
as ``WindowTimes``. Nothing is measured once windows are deferred: the output stays repeatable, and
a profile makes it the same from one start to the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from strata.core.errors import FormatError, InputError
from strata.core.settings import SETTINGS, Settings
from strata.core.types import Place
from strata.engine.fingerprints import machine_facts
from strata.engine.variants import build_variant, defer_layers
from strata.experts.below_auto import (
    LayerTimes,
    Threshold,
    WindowTimes,
    choose_below,
    from_json,
    to_json,
)
from strata.experts.late import row_shares
from strata.experts.pack import fingerprint
from strata.formats.checkpoint import Checkpoint
from strata.formats.json_file import read_json_object
from strata.formats.tokenizer import Tokenizer
from strata.kernels.plan import Draft
from strata.memory.frame import Frame
from strata.window.program import Program
from strata.window.run import WindowRunner
from strata.window.stamps import StepTimes

FAST_PART = ("shared_expert", "gpu_rows")
CPU_PART = ("ring", "wait_cpu")
WARM_UP, SAMPLED = 2, 12
"""Windows of each size that are run first and not counted, and that are."""

FORMAT, VERSION = "strata times", 1

TEXT = (
    "The ship left the harbour before dawn, and nobody on the pier could say for certain where it "
    "was bound. By noon the wind had turned. def mean(values): return sum(values) / len(values) "
    "In 1911 the first expedition reached the pole; the second arrived 34 days later. To install "
    "the package, run the command below and restart the service. Ist das nicht seltsam? "
)

Measure = Callable[[int], WindowTimes]
"""Times of windows of so many tokens."""


@dataclass(frozen=True)
class Fingerprint:
    """What times belong to: model and machine by digest, and what is resident."""

    model: str
    machine: str
    resident: str


def wanted(settings: Settings) -> bool:
    """Whether there is a threshold to work out."""
    automatic = SETTINGS["defer_cpu_below"].auto
    return settings.defer_cpu != "0" and settings.defer_cpu_below == automatic


def calibrate_at_start(
    runner: WindowRunner,
    settings: Settings,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | InputError | None,
) -> list[str]:
    """Fix the thresholds of window sizes 1 to --spec if there are any to fix; report lines."""
    if not wanted(settings) or not runner.variant.rules:
        return []

    def mark() -> Fingerprint:
        pairs = runner.service.tier.resident()
        digest = hashlib.blake2b(repr(pairs).encode(), digest_size=6).hexdigest()
        return Fingerprint(
            fingerprint(checkpoint, list(checkpoint.tensors)),
            machine_facts(settings).line,
            f"{len(pairs)} experts, {digest}",
        )

    text = tokenizer if isinstance(tokenizer, Tokenizer) else None
    return fix_thresholds(runner, settings, range(1, settings.spec + 1), text, mark)


def fix_thresholds(
    runner: WindowRunner,
    settings: Settings,
    sizes: Iterable[int],
    tokenizer: Tokenizer | None,
    mark_here: Callable[[], Fingerprint] | None = None,
    measure: Measure | None = None,
) -> list[str]:
    """Fix the threshold of each window size and say what it is, one line each.

    --defer-below-profile: its times are used where it has the size, measured and stored where not.
    InputError for a profile of another model, machine or residency. mark_here: what a profile
    must belong to; None uses none. measure: instead of timing eager windows here.
    """
    path = settings.defer_below_profile if mark_here is not None else None
    mark = mark_here() if mark_here is not None and path is not None else None
    known = _load(path, mark) if path is not None and mark is not None else {}
    if measure is None:
        tokens = tokens_for(runner, tokenizer)

        def measure(n_tokens: int) -> WindowTimes:
            return measure_windows(runner, settings, n_tokens, tokens)

    lines, stored = [], set(known)
    for n_tokens in sorted(set(sizes)):
        if n_tokens not in known:
            known[n_tokens] = measure(n_tokens)
        threshold = choose_below(known[n_tokens])
        runner.service.late_below.fix(n_tokens, threshold.below)
        lines.append(_line(threshold, path if n_tokens in stored else None))
    if path is not None and mark is not None and set(known) != stored:
        _store(path, mark, known)
        lines.append(f"defer-cpu-below auto: times stored in {path}")
    return lines


def tokens_for(runner: WindowRunner, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens of the built-in text; drawn ones for a model that has no tokenizer."""
    if tokenizer is not None:
        return list(tokenizer.encode(TEXT))
    n_vocab = runner.network.spec.n_vocab
    return [int(t) for t in np.random.default_rng(0).integers(0, n_vocab, 100)]


def measure_windows(
    runner: WindowRunner, settings: Settings, n_tokens: int, tokens: Sequence[int]
) -> WindowTimes:
    """Times of plain windows of n_tokens on this machine; the sequence is dropped."""
    network, service = runner.network, runner.service
    layers = defer_layers(settings, network)
    times, samples = StepTimes(network.spec), _Sampler()
    plain = build_variant(replace(settings, defer_cpu="0", **_NO_LATE), network, service).default
    variant = replace(
        plain,
        name="calibration",
        transforms=(*plain.transforms, _wait_at_once, times),
        rules=(*plain.rules, samples),
    )
    own = WindowRunner(network, service, runner.state, variant)
    own.state.reset()
    recorded, n = own.window(n_tokens), min(WARM_UP + SAMPLED, own.state.context_tokens // n_tokens)
    warm_up = min(WARM_UP, n - 1)
    for i in range(n):
        if i == warm_up:
            times.clear()
            samples.clear()
        at = i * n_tokens
        own.run(recorded, [tokens[(at + t) % len(tokens)] for t in range(n_tokens)])
        own.commit(n_tokens)
    own.state.reset()
    return WindowTimes(n_tokens, tuple(_layer_times(times, samples, i) for i in layers))


_NO_LATE: dict[str, Any] = {"defer_cpu_below": 0.0, "defer_layers": (), "defer_below_profile": None}


class _Sampler:
    """A rule that only looks: each missed expert's heaviest share, by layer and window."""

    def __init__(self) -> None:
        self.missed: dict[int, list[tuple[float, ...]]] = {}

    def __call__(self, draft: Draft) -> None:
        heaviest_G = np.zeros(len(draft.place_G))
        np.maximum.at(heaviest_G, draft.group_R, row_shares(draft))
        missed = heaviest_G[draft.place_G == Place.CPU]
        shares = tuple(round(float(share), 5) for share in missed)
        self.missed.setdefault(draft.layer, []).append(shares)

    def clear(self) -> None:
        """Forget the windows so far."""
        self.missed.clear()


def _wait_at_once(program: Program, frame: Frame) -> Program:
    """Every layer waits for its CPU rows right behind its ring: nothing overlaps."""
    steps = list(program.steps)
    for step in [s for s in steps if s.name == "wait_cpu"]:
        steps.remove(step)
        ring = next(i for i, s in enumerate(steps) if s.id == f"host:{step.layer}")
        steps.insert(ring + 1, step)
    return program.edited(steps)


def _layer_times(times: StepTimes, samples: _Sampler, layer: int) -> LayerTimes:
    missed = tuple(samples.missed.get(layer, ()))
    n = sum(len(window) for window in missed)
    cpu_us = 1e3 * times.layer_ms(layer, CPU_PART) * len(missed) / n if n else 0.0
    mixer_us, fast_us = 1e3 * times.mixer_ms(layer + 1), 1e3 * times.layer_ms(layer, FAST_PART)
    return LayerTimes(layer, round(mixer_us, 3), round(fast_us, 3), round(cpu_us, 3), missed)


def _line(threshold: Threshold, path: Path | None) -> str:
    return threshold.line() + (f", from {path}" if path is not None else "")


def _load(path: Path, mark: Fingerprint) -> dict[int, WindowTimes]:
    """Times by window size; nothing when the file does not exist yet."""
    if not path.exists():
        return {}
    stored = read_json_object(path)
    if stored.get("format") != FORMAT or stored.get("version") != VERSION:
        raise FormatError(f"{path} holds no times of version {VERSION}; choose another file")
    for name, here in vars(mark).items():
        if stored.get(name) != here:
            raise InputError(
                f"--defer-below-profile {path} belongs to another {name} ({stored.get(name)}, here "
                f"it is {here}); choose another file, or remove it to measure again"
            )
    found = [from_json(entry) for entry in stored.get("windows", [])]
    return {times.n_tokens: times for times in found}


def _store(path: Path, mark: Fingerprint, known: dict[int, WindowTimes]) -> None:
    windows = [to_json(known[n]) for n in sorted(known)]
    content = {"format": FORMAT, "version": VERSION, **vars(mark), "windows": windows}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--defer-below-profile {path}: {error.strerror or error}") from None
