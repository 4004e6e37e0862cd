"""A frame on the GPU: the buffers of one window size, and the device scalars its kernels read.

No Python number enters a recorded kernel: positions, counts and choices lie in device memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec


class DeviceState(SequenceState):
    """State of one sequence on a device. which: int32 [1], the committed copy of every recurrent
    tensor, for kernels; it follows the host's own note of it."""

    def __init__(
        self, specs: list[dict[str, StateSpec]], context_tokens: int, device: torch.device
    ) -> None:
        super().__init__(specs, context_tokens, device)
        self.which = torch.zeros(1, dtype=torch.int32, device=device)
        self._numbers = [torch.full((1,), i, dtype=torch.int32, device=device) for i in range(2)]

    def both(self, layer: int, name: str) -> torch.Tensor:
        """Both copies of a recurrent tensor, [2, ...]."""
        return self._tensors[layer, name]

    def recurrent(self) -> dict[tuple[int, str], torch.Tensor]:
        """Every recurrent tensor, both copies, by (layer, name)."""
        return {key: self._tensors[key] for key in self._front}

    def front_number(self, layer: int, name: str) -> torch.Tensor:
        """int32 [1] on the device: which copy of one recurrent tensor is committed."""
        return self._numbers[self._front[layer, name]]

    def settle(self) -> None:
        """Let ``which`` follow; after commits of single layers, all of them as many."""
        fronts = set(self._front.values())
        assert len(fronts) <= 1, "layers were committed unevenly"
        for front in fronts:
            self.which.fill_(front)

    @property
    def front_of_all(self) -> int:
        """Which copy of every recurrent tensor is committed; windows take it from here, so a
        commit need not launch anything for it."""
        return next(iter(self._front.values()), 0)

    def flip_all(self) -> None:
        """The other copies are the committed ones. ``which`` follows with the next window, or with
        ``settle``."""
        for key in self._front:
            self._front[key] = 1 - self._front[key]


class GpuFrame(Frame):
    """Buffers of windows of exactly T tokens.

    pos_T: int32 [T], positions. n_tokens: int32 [1], T. n_accepted: int32 [1], for commit. All
    buffers begin as zeros, as the int8 rows' unused slots must be.
    """

    state: DeviceState

    def __init__(
        self,
        n_tokens: int,
        n_active: int,
        specs: Mapping[str, BufferSpec],
        layers_of: Mapping[str, tuple[int, ...]],
        state: DeviceState,
        device: torch.device,
    ) -> None:
        super().__init__(n_tokens, n_active, specs, layers_of, state, device)
        for tensor in self.tensors().values():
            tensor.zero_()
        self.pos_T = torch.zeros(n_tokens, dtype=torch.int32, device=device)
        self.n_tokens = torch.full((1,), n_tokens, dtype=torch.int32, device=device)
        self.n_accepted = torch.zeros(1, dtype=torch.int32, device=device)
