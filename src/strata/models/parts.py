"""The pieces a window is made of, as the models see them.

A Part is one named step of one layer: what it reads and writes by buffer name, and a function that
does it on a Frame.
Mixers, residuals and FFN halves are objects that hand out Parts; ``window/`` puts them in order and
knows nothing else
about them. Nothing here knows caches of experts, places, words or graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec


@dataclass(frozen=True)
class Part:
    """One step. ``reads``/``writes`` are buffer names; names of per-layer buffers and of state are
    plain here and
    are qualified with the layer by the window builder."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[Frame], None]


class Mixer(Protocol):
    """Token mixer of one layer: reads buffer "x" [T, D], its last part writes "mixer_out" [T,
    D]."""

    layer: int

    def buffers(self) -> Mapping[str, BufferSpec]:
        """Window buffers this mixer needs besides x and mixer_out."""
        ...

    def state(self) -> Mapping[str, StateSpec]:
        """State that outlives the window."""
        ...

    def parts(self) -> tuple[Part, ...]:
        """The steps in order."""
        ...

    def commit(self, frame: Frame, n: int) -> None:
        """Advance recurrent state by the first n tokens (0..T) of the window just run. Positional
        and ring state
        need nothing: what lies past the committed length is overwritten later."""
        ...

    def kept(self, frame: Frame) -> Sequence[torch.Tensor]:
        """Inputs of the recurrence that the frame keeps until commit; none without one."""
        ...

    def rewrite(
        self, state: SequenceState, start: int, x_nD: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> None:
        """Write what n tokens from position start on leave behind again, from other inputs x.

        Keys, values, columns and block keys are replaced; inputs of the recurrence go into
        ``kept`` (n rows), from which commit or ``advance`` moves the recurrent state."""
        ...

    def advance(self, state: SequenceState, kept: Sequence[torch.Tensor]) -> None:
        """Move the recurrent state on by the tokens of ``kept``."""
        ...
