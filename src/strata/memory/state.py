"""What one sequence leaves behind between windows: KV, recurrent state, conv columns, n-gram
history.

Three kinds, and why a window that is only partly accepted never corrupts them:
    positional  [context, ...]: entry p belongs to token p; entries past the committed length are
    overwritten later.
                With stride_tokens r: [ceil(context / r), ...], entry b belongs to tokens r b .. r b
                + r - 1
    ring        [ring_entries, ...]: entry p % ring_entries; large enough that rejected tokens
    overwrite nothing needed
    recurrent   two copies: a window reads ``front`` and may write ``back``; commit flips, or
    replays n tokens first
The invariant: after commit(n) every later read equals that of a sequence fed the same tokens one at
a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch

from strata.core.errors import ContextLengthError

StateKind = Literal["positional", "ring", "recurrent"]


@dataclass(frozen=True)
class StateSpec:
    """One state tensor of one layer; ``shape`` without the position axis. Zero at the start of a
    sequence."""

    kind: StateKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    ring_entries: int = 0
    stride_tokens: int = 1
    """Positional only: tokens per entry."""

    def n_entries(self, context_tokens: int) -> int:
        """Length of the leading axis at a context of that many tokens."""
        positional = -(-context_tokens // self.stride_tokens)
        return {"positional": positional, "ring": self.ring_entries, "recurrent": 2}[self.kind]

    def n_bytes(self, context_tokens: int) -> int:
        """Bytes at a context of that many tokens."""
        return self.n_entries(context_tokens) * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of the leading axis."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that is not positional, at one length. Positional entries before it stay
    valid as long as
    the live sequence agrees with ``tokens``."""

    tokens: tuple[int, ...]
    tensors: dict[tuple[int, str], torch.Tensor] = field(repr=False)

    @property
    def n_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Image(Snapshot):
    """A copy of a whole sequence in main memory, positional entries of its tokens included."""


class SequenceState:
    """State of one sequence over all layers. ``tokens`` are the committed ids; ``length`` their
    count."""

    def __init__(
        self, specs: Sequence[Mapping[str, StateSpec]], context_tokens: int, device: torch.device
    ) -> None:
        self.context_tokens = context_tokens
        self.tokens: list[int] = []
        self._specs = {
            (layer, name): s for layer, group in enumerate(specs) for name, s in group.items()
        }
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._front: dict[tuple[int, str], int] = {}
        for key, spec in self._specs.items():
            shape = (spec.n_entries(context_tokens), *spec.shape)
            self._tensors[key] = torch.zeros(shape, dtype=spec.dtype, device=device)
            if spec.kind == "recurrent":
                self._front[key] = 0

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def tensor(self, layer: int, name: str) -> torch.Tensor:
        """A positional or ring tensor, position axis first."""
        return self._tensors[layer, name]

    def front(self, layer: int, name: str) -> torch.Tensor:
        """Recurrent state after the committed tokens."""
        return self._tensors[layer, name][self._front[layer, name]]

    def back(self, layer: int, name: str) -> torch.Tensor:
        """Scratch copy that becomes the front when flipped."""
        return self._tensors[layer, name][1 - self._front[layer, name]]

    def flip(self, layer: int, name: str) -> None:
        """Make the back copy the committed one."""
        self._front[layer, name] = 1 - self._front[layer, name]

    def require_room(self, n_tokens: int) -> None:
        """Refuse (ContextLengthError) when n_tokens more do not fit."""
        if self.length + n_tokens > self.context_tokens:
            raise ContextLengthError(self.length + n_tokens, self.context_tokens)

    def reset(self) -> None:
        """Start a new sequence."""
        self.tokens.clear()
        for key, spec in self._specs.items():
            if spec.kind != "positional":
                self._tensors[key].zero_()

    @property
    def specs(self) -> Mapping[tuple[int, str], StateSpec]:
        """What every tensor is, by (layer, name)."""
        return self._specs

    def snapshot(self) -> Snapshot:
        """Copy what positional entries do not hold, to main memory."""
        copies = {
            key: _copied(self._kept(key))
            for key, spec in self._specs.items()
            if spec.kind != "positional"
        }
        return Snapshot(tuple(self.tokens), copies)

    def image(self) -> Image:
        """Copy the whole sequence to main memory."""
        return Image(tuple(self.tokens), {key: _copied(self._kept(key)) for key in self._specs})

    def adopt(self, image: Image) -> None:
        """Continue the sequence of an image of a state with the same specs, instead of the one
        here."""
        if len(image.tokens) > self.context_tokens:
            raise ContextLengthError(len(image.tokens), self.context_tokens)
        self.reset()
        self.tokens.extend(image.tokens)
        for key, copy in image.tensors.items():
            self._kept(key).copy_(copy)

    def _kept(self, key: tuple[int, str]) -> torch.Tensor:
        """The part of a tensor that the committed tokens live in."""
        spec = self._specs[key]
        if spec.kind == "recurrent":
            return self.front(*key)
        if spec.kind == "ring":
            return self._tensors[key]
        return self._tensors[key][: spec.n_entries(self.length)]

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence; the live tokens must begin with the
        snapshot's."""
        n = len(snapshot.tokens)
        assert tuple(self.tokens[:n]) == snapshot.tokens, "snapshot of another sequence"
        del self.tokens[n:]
        for key, copy in snapshot.tensors.items():
            target = (
                self.front(*key) if self._specs[key].kind == "recurrent" else self._tensors[key]
            )
            target.copy_(copy)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
