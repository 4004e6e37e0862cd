"""Which of a prompt's missed experts the CPU computes while the link brings the others.

A layer of a chunk takes as long as the slower of two: the link with the bytes of the experts that
it brings, or the mixer and after it the CPU with those that it computes. An expert costs the link
always the same and the CPU by its rows, so the CPU takes those with the fewest rows, as many as
balance the two. Part of the layer's experts is brought before its routing is known, so that the
link never stands still. The speeds are measured: the pool's once, at a few numbers of rows, then
everything on each chunk that ran; a share whose layers took longer than the link alone would is
given up. Which expert goes where changes no bit of an exact prompt. Knows no devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

log = logging.getLogger("strata.prompt")

MARGIN = 0.02
"""Part of its time by which a layer must be quicker with a share than without."""
GIVE_UP_CHUNKS = 32
"""Chunks without a share after one that was slower."""
ROWS_TRIED = (1, 4, 8, 16, 32)
"""Rows an expert at which the pool is timed."""
HAND_OVER_S = 6e-4
"""From the routing's arrival until the pool is at work."""
AHEAD = 0.6
"""Of what the link brings of a layer, with a fixed share: brought before the routing is known."""


@dataclass(frozen=True)
class Missed:
    """Of the mean layer with routed experts: those outside the device's memory."""

    n_experts: int
    """All of a layer's."""
    n_missed: float
    expert_bytes: float
    n_active: int
    row_bytes: int
    """Of one row of results, which goes back over the link."""


@dataclass(frozen=True)
class Measured:
    """Seconds of the mean layer of a chunk that ran. cpu_s: of the layers in ``cpu_layers``, in
    which the device waited for the CPU."""

    copied_bytes: float
    copy_s: float
    mixer_s: float
    layer_s: float
    cpu_s: float
    cpu_layers: tuple[int, ...]


@dataclass
class _Size:
    """What is known of chunks of about that many tokens."""

    mixer_s: float = 0.0
    n_tokens: int = 0
    count_E: npt.NDArray[np.int32] | None = None
    """Rows of the experts of one layer."""
    resting: int = 0
    """Chunks for which no share is used."""


@dataclass
class PromptShare:
    """fixed: always this share. time_rows: rows an expert -> seconds an expert of the pool;
    link_bytes_s: bytes a second of the link. Both are asked once, before the first chunk."""

    time_rows: Callable[[int], float]
    link_bytes_s: Callable[[], float]
    fixed: float | None = None
    _per_expert: list[float] = field(default_factory=list)
    _link: float = 0.0
    _slower: float = 1.2
    """The CPU's part of a chunk takes so many times what the pool's times alone promise."""
    _sizes: dict[tuple[str, int], _Size] = field(default_factory=dict)
    _mixer_s: float = 0.0
    _missed: Missed | None = None
    _promised: list[float] = field(default_factory=list)
    """Of the current chunk's layers: seconds of the CPU, before ``_slower``."""
    _size: _Size = field(default_factory=_Size)
    _said: str = ""

    def ahead(self, kind: str, n_tokens: int, missed: Missed) -> float:
        """Of the missed experts, how many to bring without knowing the routing of the next chunk,
        of so many tokens and read in that way; 1: all, the CPU gets none."""
        self._promised, self._missed = [], missed
        self._size = size = self._sizes.setdefault((kind, n_tokens.bit_length()), _Size())
        if self.fixed is not None:
            return 1.0 if self.fixed == 0 else AHEAD * (1 - self.fixed)
        if not missed.n_missed:
            return 1.0
        if not self._per_expert:
            self._per_expert = [self.time_rows(rows) for rows in ROWS_TRIED]
            self._link = self._link or self.link_bytes_s()
        self._mixer_s = mixer = self._mixer(kind, n_tokens)
        if size.resting:
            size.resting -= 1
            return 1.0
        alone = max(missed.n_missed * self._of_link(), mixer)
        count_E = self._expected(n_tokens, missed)
        share = missed.n_missed / missed.n_experts
        n, layer_s = self._best(np.sort(count_E), 0.0, share)
        self._say(n_tokens, missed, alone, n * share, layer_s)
        if layer_s > alone * (1 - MARGIN):
            return 1.0
        # what is brought later must be there before the CPU ends
        early = layer_s - 0.5 * max(0.0, layer_s - mixer)
        most = 1 - n / missed.n_experts
        return float(np.clip(early / (missed.n_missed * self._of_link()), 0.0, most))

    def pick(
        self, count_E: npt.NDArray[np.int32], missing_E: npt.NDArray[np.bool_],
        open_E: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:  # fmt: skip
        """The CPU's experts of a layer: among the open ones, which are missing and not on their
        way. count_E: rows of each expert."""
        order = np.flatnonzero(open_E)
        order = order[np.argsort(count_E[order], kind="stable")]
        if self.fixed is not None:
            n = round(self.fixed * int(missing_E.sum()))
        else:
            self._size.count_E = count_E
            brought = int(missing_E.sum()) - len(order)
            n, _ = self._best(count_E[order], brought * self._of_link(), 1.0)
            self._promised.append(float(self._cpu(count_E[order[:n]]).sum()))
        found = np.zeros(len(count_E), dtype=np.bool_)
        found[order[:n]] = True
        return found

    def learn(self, kind: str, n_tokens: int, measured: Measured) -> None:
        """The chunk ran so."""
        size, missed = self._size, self._missed
        size.mixer_s, size.n_tokens = measured.mixer_s, n_tokens
        if measured.copy_s > 0 and measured.copied_bytes > 0:
            self._link = measured.copied_bytes / measured.copy_s
        if self.fixed is not None or not self._promised or missed is None:
            return
        promised = [self._promised[i] for i in measured.cpu_layers if i < len(self._promised)]
        if promised and (mean := sum(promised) / len(promised)) > HAND_OVER_S:
            self._slower = float(np.clip((measured.cpu_s - HAND_OVER_S) / mean, 0.5, 20))
        alone = max(missed.n_missed * missed.expert_bytes / self._link, measured.mixer_s)
        if measured.layer_s > alone * (1 + MARGIN):
            size.resting = GIVE_UP_CHUNKS
            log.info(
                "prompts of about %d tokens: a layer took %.2f ms with a share for the CPU, the "
                "link alone would take %.2f: the CPU gets none for %d chunks",
                n_tokens, 1e3 * measured.layer_s, 1e3 * alone, GIVE_UP_CHUNKS,
            )  # fmt: skip

    def _of_link(self) -> float:
        """Seconds of an expert."""
        assert self._missed is not None
        return self._missed.expert_bytes / self._link

    def _cpu(self, count_N: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Seconds of experts with so many rows, by straight lines between the measured points."""
        at, each = ROWS_TRIED, self._per_expert
        slope = max(0.0, each[-1] - each[-2]) / (at[-1] - at[-2])
        beyond = np.maximum(count_N - at[-1], 0) * slope
        seconds: npt.NDArray[np.float64] = np.interp(count_N, at, each) + beyond
        return np.where(count_N > 0, seconds, 0.0)

    def _best(
        self, count_N: npt.NDArray[np.int32], before_s: float, part: float
    ) -> tuple[int, float]:
        """How many of the experts, ascending by their rows, the CPU takes, and the layer's seconds
        then. before_s: of the link, for others; part: only so many of them are missed."""
        assert self._missed is not None
        n = np.arange(len(count_N) + 1)
        cpu = np.concatenate([[0.0], np.cumsum(self._cpu(count_N))]) * self._slower * part
        rows = np.concatenate([[0], np.cumsum(count_N)]) * part
        back = rows * self._missed.row_bytes / self._link
        # experts without rows need nobody
        brought = (len(count_N) - np.maximum(n, int((count_N == 0).sum()))) * part
        link = before_s + brought * self._of_link() + back
        behind = self._mixer_s + np.where(rows > 0, HAND_OVER_S, 0.0) + cpu + back
        layer = np.maximum(link, behind)
        best = int(layer.argmin())
        return best, float(layer[best])

    def _mixer(self, kind: str, n_tokens: int) -> float:
        """Seconds; of the nearest size that was measured, in proportion. 0 before the first."""
        known = [s for (how, _), s in self._sizes.items() if how == kind and s.n_tokens]
        if not known:
            return 0.0
        nearest = min(known, key=lambda s: abs(np.log(s.n_tokens / n_tokens)))
        return nearest.mixer_s * n_tokens / nearest.n_tokens

    def _expected(self, n_tokens: int, missed: Missed) -> npt.NDArray[np.int32]:
        """Rows of each expert: as in the last chunk of that size, or by chance."""
        seen = self._size.count_E
        if seen is not None and self._size.n_tokens:
            return (seen * (n_tokens / self._size.n_tokens)).astype(np.int32)
        mean = n_tokens * missed.n_active / missed.n_experts
        return np.random.default_rng(0).poisson(mean, missed.n_experts).astype(np.int32)

    def _say(
        self, n_tokens: int, missed: Missed, alone: float, n_host: float, layer_s: float
    ) -> None:
        line = f"{n_tokens.bit_length()} {n_host / max(1.0, missed.n_missed):.1f}"
        if line == self._said:
            return
        self._said = line
        log.info(
            "prompt of %d tokens: %.0f of %.0f missed experts a layer may be the CPU's (%.0f %%): "
            "%.1f ms a layer instead of the link's %.1f; the mixer takes %.1f",
            n_tokens, n_host, missed.n_missed, 1e2 * n_host / max(1.0, missed.n_missed),
            1e3 * layer_s, 1e3 * alone, 1e3 * self._mixer_s,
        )  # fmt: skip
