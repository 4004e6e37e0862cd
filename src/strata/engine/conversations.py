"""Keeps conversations so that a prompt is read only from where it is new.

The engine holds one live sequence. Recurrent state cannot be cut back, so copies of it
(*checkpoints*) are taken while prompts are read, at multiples of the chunk size: near the end,
where the prompt parted from what was kept, and at doubling distances. A sequence that is left for
another one is *parked*: copied to main memory as a whole, with its checkpoints, the least recently
used ones going first when the budget is full.

Invariant: after ``arrange`` the engine has committed exactly the reused tokens, and its state is
what reading them afresh would have made, unless ``Reuse.inexact_tokens`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import psutil

from strata.core.log import LOG
from strata.engine.conversation_file import ConversationFolder, Kept
from strata.engine.events import Reuse
from strata.memory.state import Image, SequenceState, Snapshot

Logits = npt.NDArray[np.float32]
ReadProgress = Callable[[int, int], None]

ALL = 1 << 62
AUTO_PARK_BYTES = 2 << 30
AUTO_FREE_BYTES = 2 << 30
"""With --park-gb auto: at most the first, and only while the second stays available."""


class Keeper(Protocol):
    """What this needs of an engine."""

    @property
    def state(self) -> SequenceState:
        """The live sequence."""
        ...

    def reset(self) -> None:
        """A new sequence."""
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Back to an earlier place of the sequence."""
        ...

    def adopt(self, image: Image) -> None:
        """Another sequence instead of this one."""
        ...


@dataclass
class Live:
    """What is known about the sequence in the engine besides its state."""

    checkpoints: list[Snapshot] = field(default_factory=list)
    row: Logits | None = None
    """Logits after its last token, when they are known."""
    exact_tokens: int = ALL
    """Tokens at its begin whose state is that of a fresh start."""


@dataclass(frozen=True)
class Offer:
    """What one kept sequence has for a prompt. shared: equal tokens; reused: those whose state can
    be had; cut: the checkpoint to go back to for it."""

    shared: int
    length: int
    reused: int
    cut: Snapshot | None = None


def offer(
    kept: Sequence[int],
    checkpoints: Iterable[Snapshot],
    prompt: Sequence[int],
    *,
    has_row: bool = False,
    usable: int | None = None,
) -> Offer:
    """How much of the prompt a kept sequence holds, at least one token being left to read unless
    the logits after the last are known (has_row). usable: its first tokens that may be reused."""
    usable = len(kept) if usable is None else usable
    shared = common_prefix(kept, prompt)
    if shared == len(kept) == usable and (shared < len(prompt) or has_row):
        return Offer(shared, len(kept), shared)
    most = min(shared, len(prompt) - 1, usable)
    cuts = [snapshot for snapshot in checkpoints if 0 < len(snapshot.tokens) <= most]
    best = max(cuts, key=lambda snapshot: len(snapshot.tokens), default=None)
    return Offer(shared, len(kept), len(best.tokens) if best else 0, best)


class Conversations:
    """Arranges the engine's state for each prompt.

    n_checkpoints: most copies kept for a sequence. park_bytes: budget for parked ones, -1 automatic
    (see AUTO_PARK_BYTES). exact_windows: whether windows leave the state that reading would;
    reuse_inexact: whether state that they left otherwise may be reused (and is then reported) or
    is read again. folder: where conversations outlive the process.
    """

    def __init__(
        self,
        engine: Keeper,
        *,
        chunk_tokens: int,
        n_checkpoints: int,
        park_bytes: int,
        exact_windows: bool = True,
        reuse_inexact: bool = True,
        folder: ConversationFolder | None = None,
    ) -> None:
        self._engine = engine
        self._chunk = chunk_tokens
        self._most = n_checkpoints
        self._park_bytes = park_bytes
        self._exact_windows = exact_windows
        self._reuse_inexact = reuse_inexact
        self._folder = folder
        self.live = Live()
        self.parked: list[Kept] = []
        """The most recently used one last."""

    def arrange(self, prompt: Sequence[int], exact_only: bool = False) -> Reuse:
        """Make the engine hold the longest kept beginning of the prompt (that is exact)."""
        state, live = self._engine.state, self.live
        best = offer(
            state.tokens,
            live.checkpoints,
            prompt,
            has_row=live.row is not None,
            usable=self._usable(state.length, live.exact_tokens, exact_only),
        )
        source: Kept | None = None
        for kept in [*self.parked, *(self._folder.stored() if self._folder else ())]:
            usable = self._usable(len(kept.tokens), kept.exact_tokens, exact_only)
            other = offer(kept.tokens, kept.checkpoints, prompt, usable=usable)
            if (other.reused, other.shared) > (best.reused, best.shared):
                best, source = other, kept
        # another conversation begins: what it leaves is put aside before it is overwritten
        if common_prefix(state.tokens, prompt) * 2 < state.length:
            self._park_live()
        leaves = best.shared * 2 < best.length
        if source is not None and not self._take(source, stays=leaves):
            return self.arrange(prompt, exact_only)  # it was damaged and is gone now
        if best.cut is not None:
            n = len(best.cut.tokens)
            # of a stored sequence the offer was made by its header: the copies came with the rest
            self._cut(next(s for s in self.live.checkpoints if len(s.tokens) == n))
        elif best.reused == 0:
            self.reset()
        differs = best.shared if best.shared < min(best.length, len(prompt)) else None
        inexact = max(0, best.reused - self.live.exact_tokens)
        if not inexact:
            self.live.exact_tokens = ALL  # what is read now is exact as well
        if best.reused < len(prompt):
            self.live.row = None
        return Reuse(len(prompt), best.reused, differs, inexact)

    def reading(
        self, prompt: Sequence[int], reuse: Reuse, progress: ReadProgress | None
    ) -> ReadProgress:
        """The progress callback for reading the rest of the prompt: takes checkpoints on its
        way."""
        wanted = self._places(reuse, len(prompt))

        def after_chunk(done: int, total: int) -> None:
            state = self._engine.state
            if state.length in wanted:
                self.live.checkpoints.append(state.snapshot())
                self._thin()
            if progress is not None:
                progress(done, total)

        return after_chunk

    def row(self) -> Logits | None:
        """Logits after the last committed token, if they are known."""
        return self.live.row

    def set_row(self, row: Logits | None) -> None:
        """These are the logits after the last committed token."""
        self.live.row = row

    def wrote_window(self, exact: bool | None = None) -> None:
        """A window is about to add to the sequence; exact None: as all of them are."""
        if not (self._exact_windows if exact is None else exact):
            self.live.exact_tokens = min(self.live.exact_tokens, self._engine.state.length)

    def rewind(self) -> bool:
        """After a prompt was broken off: back to the last checkpoint; whether there was one."""
        tokens = self._engine.state.tokens
        valid = [s for s in self.live.checkpoints if tuple(tokens[: len(s.tokens)]) == s.tokens]
        if not valid:
            return False
        self._cut(max(valid, key=lambda s: len(s.tokens)))
        return True

    def reset(self) -> None:
        """A new sequence, nothing kept of the live one."""
        self.live = Live()
        self._engine.reset()

    @property
    def parked_bytes(self) -> int:
        """Main memory of the parked conversations."""
        return sum(kept.n_bytes for kept in self.parked)

    def save(self) -> int:
        """Write the live and the parked conversations to the folder, if there is one; how many."""
        if self._folder is None:
            return 0
        self._park_live(within_budget=False)
        return self._folder.save(self.parked)

    def _take(self, source: Kept, *, stays: bool) -> bool:
        """Bring a kept sequence into the engine; False when its file turned out to be damaged.
        stays: it remains parked too, because only its beginning is wanted."""
        if source.image is None:
            assert self._folder is not None
            loaded = self._folder.load(source)
            if loaded is None:
                return False
            source = loaded
            if stays and self.parked_bytes + source.n_bytes <= self._budget():
                self.parked.append(source)
        else:
            self.parked.remove(source)
            if stays:
                self.parked.append(source)
        assert source.image is not None
        self._engine.adopt(source.image)
        whole = source.exact_tokens >= len(source.tokens)
        self.live = Live(list(source.checkpoints), None, ALL if whole else source.exact_tokens)
        return True

    def _cut(self, snapshot: Snapshot) -> None:
        n = len(snapshot.tokens)
        live = self.live
        self._engine.restore(snapshot)
        live.checkpoints = [s for s in live.checkpoints if len(s.tokens) <= n]
        live.row = None

    def _park_live(self, within_budget: bool = True) -> None:
        """Copy the live sequence to main memory, if it is worth it and there is room."""
        state = self._engine.state
        if state.length < self._chunk or not self.live.checkpoints:
            return  # quicker read again than kept
        used = {n: spec.n_entries(state.length) for n, spec in state.specs.items()}
        copies = sum(s.n_bytes for s in self.live.checkpoints)
        need = copies + sum(spec.entry_bytes * used[n] for n, spec in state.specs.items())
        budget = self._budget()
        if within_budget and need > budget:
            if budget:
                LOG.info("a conversation of %d bytes exceeds the room for parked ones", need)
            return
        tokens = tuple(state.tokens)
        self.parked = [k for k in self.parked if k.tokens != tokens[: len(k.tokens)]]
        while within_budget and self.parked and self.parked_bytes + need > budget:
            self.parked.pop(0)
        image: Image = state.image()
        exact = min(len(tokens), self.live.exact_tokens)
        kept = Kept(tokens, image, tuple(self.live.checkpoints), exact)
        self.parked.append(kept)

    def _usable(self, length: int, exact_tokens: int, exact_only: bool) -> int:
        whole = self._reuse_inexact and not exact_only
        return length if whole else min(length, exact_tokens)

    def _budget(self) -> int:
        if self._park_bytes >= 0:
            return self._park_bytes
        free = int(psutil.virtual_memory().available) - AUTO_FREE_BYTES + self.parked_bytes
        return max(0, min(AUTO_PARK_BYTES, free))

    def _places(self, reuse: Reuse, n_prompt: int) -> set[int]:
        """Where to take checkpoints: the last multiples of the chunk size before the end at
        doubling distances, and the one before the place where the prompt left what was kept."""
        if not self._most:
            return set()
        last = (n_prompt - 1) // self._chunk
        steps = [last - (1 << i) + 1 for i in range(max(1, self._most - 1))]
        if reuse.first_difference is not None:
            steps.append(reuse.first_difference // self._chunk)
        places = {step * self._chunk for step in steps if step > 0}
        return {place for place in places if place > reuse.reused_tokens}

    def _thin(self) -> None:
        """Keep the budget of copies: drop the one whose neighbours are nearest to each other."""
        kept = self.live.checkpoints
        kept.sort(key=lambda s: len(s.tokens))
        while len(kept) > self._most:
            at = [0, *(len(s.tokens) for s in kept)]
            gaps = [(at[i + 2] - at[i], i) for i in range(len(kept) - 1)]
            kept.pop(min(gaps)[1] if gaps else 0)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of both."""
    n = min(len(a), len(b))
    low = 0
    # whole slices compare at C speed; a prompt has up to 10^5 tokens and several candidates
    step = n
    while step:
        step = min(step, n - low)
        if list(a[low : low + step]) == list(b[low : low + step]):
            low += step
            if low == n:
                break
        else:
            step //= 2
    return low
