"""A frame: the buffers of one window size, bound to one sequence state. Knows no models and no
steps.

Every buffer that one step writes and another reads lies here under a name; temporaries inside a
step do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from strata.memory.state import SequenceState


@dataclass(frozen=True)
class BufferSpec:
    """Shape without the leading axis. The leading axis is the window's T; R = T * n_active for "R";
    for "H" the number
    of positions whose logits are wanted (the last ones of the window)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    lead: Literal["T", "R", "H"] = "T"
    per_layer: bool = False
    """One copy per layer, kept until commit (inputs that a partial commit replays)."""

    def n_bytes(self, n_lead: int) -> int:
        """Bytes for n_lead leading entries."""
        return n_lead * prod(self.shape) * self.dtype.itemsize


class Frame:
    """Named tensors for windows of exactly T tokens.

    ``start`` is the position of the window's first token; ``tokens`` the window's ids. Both are set
    before a run.
    With keep_inputs=False (prompt chunks: everything is committed) per-layer buffers share one
    copy.
    """

    def __init__(
        self,
        n_tokens: int,
        n_active: int,
        specs: Mapping[str, BufferSpec],
        layers_of: Mapping[str, tuple[int, ...]],
        state: SequenceState,
        device: torch.device,
        keep_inputs: bool = True,
        n_head: int | None = None,
    ) -> None:
        self.T = n_tokens
        self.n_head = n_tokens if n_head is None else n_head
        self.R = n_tokens * n_active
        self.state = state
        self.device = device
        self.keep_inputs = keep_inputs
        self.start = 0
        self.tokens: tuple[int, ...] = ()
        self.rewritten: set[int] = set()
        """Layers whose kept inputs are replaced after their recurrence ran: commit replays them."""
        self._tensors: dict[str, torch.Tensor] = {}
        for name, spec in specs.items():
            lead = {"T": self.T, "R": self.R, "H": self.n_head}[spec.lead]
            layers = layers_of.get(name, ()) if spec.per_layer and keep_inputs else ()
            for key in [f"{name}:{layer}" for layer in layers] or [name]:
                self._tensors[key] = torch.empty(
                    (lead, *spec.shape), dtype=spec.dtype, device=device
                )

    def add(self, specs: Mapping[str, BufferSpec]) -> None:
        """More shared buffers, which begin as zeros."""
        for name, spec in specs.items():
            lead = {"T": self.T, "R": self.R, "H": self.n_head}[spec.lead]
            shape = (lead, *spec.shape)
            self._tensors[name] = torch.zeros(shape, dtype=spec.dtype, device=self.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A shared buffer by name."""
        return self._tensors[name]

    def at(self, name: str, layer: int) -> torch.Tensor:
        """A per-layer buffer (the shared copy when this frame does not keep inputs)."""
        return self._tensors[f"{name}:{layer}"] if self.keep_inputs else self._tensors[name]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All buffers by qualified name ("name" or "name:layer")."""
        return self._tensors

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())
