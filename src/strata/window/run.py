"""Runs windows: stages tokens, runs the recorded program, hands out logits, commits.

Has no idea which features are on. The invariant: between ``run`` and ``commit`` the sequence state
seen by later
windows is unchanged; after an error nothing of the window remains and no worker touches a buffer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from strata.experts.service import ExpertService
from strata.kernels.plan import Rule
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState
from strata.models.network import Network
from strata.window.choice import Choice
from strata.window.layer import make_frame, plain_program
from strata.window.program import Program, check
from strata.window.record import eager, poisoned

Transform = Callable[[Program, Frame], Program]
MAX_WINDOW_TOKENS = 8
CHUNK_FRAMES_KEPT = 2


@dataclass(frozen=True)
class Variant:
    """One way to run windows: how features change the steps, the plan's rules, and the buffers they
    add.

    Prompt chunks always run the plain variant.
    """

    name: str = "exact"
    transforms: tuple[Transform, ...] = ()
    rules: tuple[Rule, ...] = ()
    buffers: Mapping[str, BufferSpec] = field(default_factory=dict)


PLAIN = Variant()


@dataclass(frozen=True)
class Recorded:
    """A program ready to run on its frame."""

    frame: Frame
    program: Program
    run: Callable[[], None]


class WindowRunner:
    """All window sizes of one engine over one sequence state."""

    def __init__(
        self,
        network: Network,
        service: ExpertService,
        state: SequenceState,
        variant: Variant = PLAIN,
        poison: bool = False,
        overlaps: Mapping[str, Variant] | None = None,
    ) -> None:
        self.overlaps = {"exact": PLAIN, **(overlaps or {})}
        """What a request may choose instead of ``variant``."""
        self.network = network
        self.service = service
        self.state = state
        self.variant = variant
        self._poison = poison
        self._windows: dict[tuple[str, int], Recorded] = {}
        self._chunks: OrderedDict[tuple[int, int], Recorded] = OrderedDict()
        self._pending: Recorded | None = None
        self.choice: Choice | None = None
        """Nothing is found out before somebody reads the logits."""

    def window(self, n_tokens: int) -> Recorded:
        """The program for verify windows of n_tokens (1..8), made at first use and kept."""
        if not 1 <= n_tokens <= MAX_WINDOW_TOKENS:
            raise ValueError(f"a window has 1..{MAX_WINDOW_TOKENS} tokens, not {n_tokens}")
        key = (self.variant.name, n_tokens)
        if key not in self._windows:
            self._windows[key] = self._record(n_tokens, n_tokens, self.variant, keep_inputs=True)
        return self._windows[key]

    def chunk(self, n_tokens: int, n_head: int) -> Recorded:
        """The program for a prompt chunk whose last n_head logits are wanted; everything is
        committed."""
        key = (n_tokens, n_head)
        if key not in self._chunks:
            self._chunks[key] = self._record(n_tokens, n_head, PLAIN, keep_inputs=False)
            while len(self._chunks) > CHUNK_FRAMES_KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]

    def run(self, recorded: Recorded, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [n_head, V] of the window; the state is not advanced yet. Raises
        ContextLengthError first."""
        self.state.require_room(len(tokens))
        self._pending = None
        frame = recorded.frame
        frame.start = self.state.length
        frame.tokens = tuple(tokens)
        frame["ids"].copy_(torch.tensor(frame.tokens, dtype=torch.int64))
        for ngram in self.network.ngrams.values():
            frame["ngram_rows"].copy_(ngram.rows(self.state.tokens, frame.tokens))
        try:
            recorded.run()
        except BaseException:
            self.service.drain()
            raise
        self._pending = recorded
        return frame["logits"]

    def on_host(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """What ``run`` gave, in main memory, valid until the next run."""
        return logits_TV

    def commit(self, n: int) -> None:
        """Keep the first n tokens (0..T) of the window just run."""
        recorded = self._pending
        if recorded is None:
            raise ValueError("commit without a window that ran")
        if not 0 <= n <= recorded.frame.T:
            raise ValueError(f"commit({n}) of a window of {recorded.frame.T} tokens")
        self._pending = None
        for mixer in self.network.mixers:
            mixer.commit(recorded.frame, n)
        self.state.tokens.extend(recorded.frame.tokens[:n])

    def _record(self, n_tokens: int, n_head: int, variant: Variant, keep_inputs: bool) -> Recorded:
        frame = make_frame(
            self.network,
            self.state,
            n_tokens,
            extra=variant.buffers,
            n_head=n_head,
            keep_inputs=keep_inputs,
        )
        program = plain_program(self.network, frame, self.service, variant.rules)
        for transform in variant.transforms:
            program = transform(program, frame)
        check(program)
        run = poisoned(program, frame.tensors()) if self._poison else eager(program)
        return Recorded(frame, program, run)
