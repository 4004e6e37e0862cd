"""How much to defer: the weight threshold of ``--defer-cpu-below auto``, from measured times.

With m the next mixer, f the fast tier's part and c = c_on + c_late the CPU's part of a layer, a
window gains min(m, c - max(f, c_on)) there when the late rows join one mixer later. That is all
there is to gain as soon as the late rows fill the mixer (c_late = m); more late rows cost quality
and buy nothing. So the threshold is the smallest whose gain, summed over layers and sampled
windows, is nearly that of deferring everything. Pure arithmetic on a record of times: who measures
them, and where, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.errors import FormatError

ENOUGH = 0.93
"""Share of the whole gain that the threshold must keep. The last few percent are dear: windows
differ, and to fill the mixer of nearly all of them most rows have to be late."""

_STEP = 1e-4
"""Thresholds are multiples of this."""


@dataclass(frozen=True)
class LayerTimes:
    """One deferrable layer at one window size, microseconds a window.

    mixer_us: m, the mixer half of the next layer. fast_us: f. cpu_us: of one missed expert on the
    CPU. missed: for each sampled window the missed experts, each by its heaviest row's share of
    its token's routing weight.
    """

    layer: int
    mixer_us: float
    fast_us: float
    cpu_us: float
    missed: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class WindowTimes:
    """What was measured for windows of n_tokens."""

    n_tokens: int
    layers: tuple[LayerTimes, ...]


@dataclass(frozen=True)
class Threshold:
    """below: rows with less than this share are late; 0: none, infinity: all. gain_us, whole_us:
    predicted a window, with it and with all rows late; late_share: of the missed experts; the
    means over layers and windows of m, f and c."""

    n_tokens: int
    below: float
    gain_us: float
    whole_us: float
    late_share: float
    mixer_us: float
    fast_us: float
    cpu_us: float

    def line(self) -> str:
        """For the start-up report."""
        what = f"defer-cpu-below auto: windows of {self.n_tokens}: "
        means = (
            f"m {self.mixer_us:.0f}, f {self.fast_us:.0f}, c {self.cpu_us:.0f} us a layer, "
            f"predicted gain {self.gain_us:.0f} of {self.whole_us:.0f} us a window"
        )
        if self.below == 0:
            return f"{what}nothing is late: the CPU is not waited for ({means})"
        limit = "all rows" if math.isinf(self.below) else f"rows below {self.below:.4f}"
        return f"{what}{limit} are late, {100 * self.late_share:.0f} % of the experts ({means})"


def choose_below(times: WindowTimes) -> Threshold:
    """The threshold for a window size; the same times always give the same one."""
    samples = _Samples.of(times)
    whole, _ = samples.gain(math.inf)
    below, gain, late = 0.0, 0.0, 0.0
    if whole > 0:
        for below in samples.candidates():
            gain, late = samples.gain(below)
            if gain >= ENOUGH * whole:
                break
    n = max(len(samples.mixer), 1)
    return Threshold(
        times.n_tokens,
        below,
        gain / samples.n_windows,
        whole / samples.n_windows,
        late,
        float(samples.mixer.sum()) / n,
        float(samples.fast.sum()) / n,
        float((samples.cpu * samples.count).sum()) / n,
    )


@dataclass(frozen=True)
class Gain:
    """What a threshold brings, in microseconds a window, and the share of the missed experts that
    are late with it. below: as in ``Threshold``."""

    below: float
    us: float
    late_share: float


def gain_of(times: WindowTimes, below: float) -> Gain:
    """Predicted: the sum over layers of min(m, max(0, c - max(f, c_on))), a mean of the sampled
    windows."""
    samples = _Samples.of(times)
    us, late = samples.gain(below)
    return Gain(below, us / samples.n_windows, late)


@dataclass(frozen=True)
class _Samples:
    """One entry per layer and sampled window [n]; share: of every missed expert, at: its entry."""

    mixer: npt.NDArray[np.float64]
    fast: npt.NDArray[np.float64]
    cpu: npt.NDArray[np.float64]
    count: npt.NDArray[np.int64]
    share: npt.NDArray[np.float64]
    at: npt.NDArray[np.int64]
    n_windows: int

    @classmethod
    def of(cls, times: WindowTimes) -> _Samples:
        entries = [(layer, shares) for layer in times.layers for shares in layer.missed]
        count = np.array([len(shares) for _, shares in entries], dtype=np.int64)
        return cls(
            np.array([layer.mixer_us for layer, _ in entries]),
            np.array([layer.fast_us for layer, _ in entries]),
            np.array([layer.cpu_us for layer, _ in entries]),
            count,
            np.array([s for _, shares in entries for s in shares], dtype=np.float64),
            np.repeat(np.arange(len(entries)), count),
            max((len(layer.missed) for layer in times.layers), default=1) or 1,
        )

    def candidates(self) -> Iterator[float]:
        """Thresholds in ascending order: just above each share there is; then all rows."""
        steps = np.unique(np.floor(self.share / _STEP).astype(np.int64) + 1)
        yield from (round(float(step) * _STEP, 6) for step in steps[:-1])
        yield math.inf

    def gain(self, below: float) -> tuple[float, float]:
        """(microseconds over all entries, share of the missed experts that are late)."""
        is_late = self.share < below
        late = np.bincount(self.at[is_late], minlength=len(self.count))
        whole, on_time = self.cpu * self.count, self.cpu * (self.count - late)
        hidden = np.minimum(self.mixer, whole - np.maximum(self.fast, on_time))
        n = max(len(self.share), 1)
        return float(np.maximum(hidden, 0).sum()), float(is_late.sum()) / n


def to_json(times: WindowTimes) -> dict[str, Any]:
    """For a profile file."""
    return asdict(times)


def from_json(stored: Mapping[str, Any]) -> WindowTimes:
    """What ``to_json`` gave; FormatError for anything else."""
    try:
        layers = tuple(
            LayerTimes(
                int(layer["layer"]),
                _time(layer["mixer_us"]),
                _time(layer["fast_us"]),
                _time(layer["cpu_us"]),
                tuple(tuple(_time(share) for share in window) for window in layer["missed"]),
            )
            for layer in stored["layers"]
        )
        return WindowTimes(int(stored["n_tokens"]), layers)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a record of times is damaged: {error!r}") from None


def _time(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not (0 <= number < math.inf):
        raise ValueError(f"{number} is no time")
    return number
