"""Works ``--defer-cpu-below auto`` out when an engine starts: times of a few plain windows, or a
stored profile of them, become one threshold per window size.

Measured: windows of built-in text in which every layer waits for its CPU rows at once, so that
mixers, the fast tier's part and the CPU's part do not overlap (``engine/window_times.py``). Nothing
is measured once windows are deferred: the output stays repeatable, and
a profile makes it the same from one start to the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.core.errors import FormatError, InputError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.engine.fingerprints import machine_facts
from strata.engine.window_times import Sampling
from strata.experts.below_auto import (
    Threshold,
    WindowTimes,
    choose_below,
    from_json,
    to_json,
)
from strata.experts.fast_tier import Pair
from strata.experts.pack import fingerprint
from strata.formats.checkpoint import Checkpoint
from strata.formats.json_file import read_json_object
from strata.formats.tokenizer import Tokenizer

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
    runner: Any,
    settings: Settings,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | InputError | None,
) -> list[str]:
    """Fix the thresholds of window sizes 1 to --spec if there are any to fix; report lines."""
    if not wanted(settings) or not _has_late(runner.variant):
        return []

    def mark() -> Fingerprint:
        return _mark(settings, checkpoint, runner.service.tier.resident())

    text = tokenizer if isinstance(tokenizer, Tokenizer) else None
    lines = fix_thresholds(runner, settings, range(1, settings.spec + 1), text, mark)
    runner.service.counters.clear()  # "since the start" is about answers
    return lines


def require_times(settings: Settings, checkpoint: Checkpoint, pairs: Sequence[Pair] | None) -> None:
    """Before anything is loaded: FormatError or InputError for a --defer-below-profile that would
    be refused later. pairs: the resident experts; None when they are not known yet."""
    path = settings.defer_below_profile
    if path is not None and wanted(settings) and path.exists():
        mark = _mark(settings, checkpoint, pairs or ())
        _load(path, mark, but=("resident",) if pairs is None else ())


def _mark(settings: Settings, checkpoint: Checkpoint, pairs: Sequence[Pair]) -> Fingerprint:
    digest = hashlib.blake2b(repr(sorted(pairs)).encode(), digest_size=6).hexdigest()
    return Fingerprint(
        fingerprint(checkpoint, list(checkpoint.tensors)),
        machine_facts(settings).line,
        f"{len(pairs)} experts, {digest}",
    )


def _has_late(variant: Any) -> bool:
    """Whether a variant, of the CPU or a device, has late rows at all."""
    return bool(getattr(variant, "rules", ())) or any(getattr(variant, "late_L", ()))


def fix_thresholds(
    runner: Any,
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


def tokens_for(runner: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens of the built-in text; drawn ones for a model that has no tokenizer."""
    if tokenizer is not None:
        return list(tokenizer.encode(TEXT))
    n_vocab = runner.network.spec.n_vocab
    return [int(t) for t in np.random.default_rng(0).integers(0, n_vocab, 100)]


def measure_windows(
    runner: Any,
    settings: Settings,
    n_tokens: int,
    tokens: Sequence[int],
    more: Sequence[Any] = (),
) -> WindowTimes:
    """Times of plain windows of n_tokens on this machine; the sequence is dropped.

    runner: the CPU's or a device's. more: transformations in front, such as a routing trace.
    """
    sampling = Sampling(runner, settings, f"calibration {n_tokens}", more)
    runner.state.reset()
    run_sampled(runner, sampling, n_tokens, tokens)
    runner.state.reset()
    return require_measured(sampling.taken(n_tokens))


def require_measured(times: WindowTimes) -> WindowTimes:
    """The times; SettingError when the clock gave none, so that no threshold is made up."""
    if times.layers and not any(layer.mixer_us > 0 for layer in times.layers):
        raise SettingError(
            f"--defer-cpu-below auto: windows of {times.n_tokens} could not be timed here (every "
            f"mixer took 0 us); give a share, such as 0.1"
        )
    return times


def run_sampled(runner: Any, sampling: Sampling, n_tokens: int, tokens: Sequence[int]) -> None:
    """Windows from where the sequence is, as many as are counted and fit. SettingError when none
    does."""
    before, runner.variant = runner.variant, sampling.variant
    try:
        recorded = runner.window(n_tokens)
        room = (runner.state.context_tokens - runner.state.length) // n_tokens
        n = min(WARM_UP + SAMPLED, room)
        if n < 1:
            raise SettingError(
                f"--defer-cpu-below auto: a context of {runner.state.context_tokens} tokens has no "
                f"room to time windows of {n_tokens}; use a larger --context, or give a share"
            )
        for i in range(n):
            if i == min(WARM_UP, n - 1):
                sampling.clear()
            at = i * n_tokens
            runner.run(recorded, [tokens[(at + t) % len(tokens)] for t in range(n_tokens)])
            runner.commit(n_tokens)
            sampling.ran(n_tokens)
    finally:
        runner.variant = before


def _line(threshold: Threshold, path: Path | None) -> str:
    return threshold.line() + (f", from {path}" if path is not None else "")


def _load(path: Path, mark: Fingerprint, but: Sequence[str] = ()) -> dict[int, WindowTimes]:
    """Times by window size; nothing when the file does not exist yet. but: names in the mark that
    are not looked at."""
    if not path.exists():
        return {}
    try:
        stored = read_json_object(path)
    except FormatError:
        stored = {}
    if stored.get("format") != FORMAT or stored.get("version") != VERSION:
        raise FormatError(
            f"--defer-below-profile {path} holds no times of version {VERSION}; choose another file"
        )
    for name, here in vars(mark).items():
        if name not in but and stored.get(name) != here:
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
