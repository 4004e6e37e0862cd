"""Host memory at both ends of a window's graph: what the window begins with, and what the host
reads when it has ended. Page-locked on a GPU, so that the graph's own kernels read and write it.

Logits are not among it: they stay on the device until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from strata.experts.device_service import PlanBuffers
from strata.kernels.words.triton_ends import START_WORDS, hand_out, take_in
from strata.models.gpu.frame import GpuFrame
from strata.window.choice import Choice

NgramGather = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""(previous tokens, tokens) -> rows f32 [T, width]"""


class Staged:
    """The two ends of one window size. made: the plan's buffers, None in a dense model."""

    def __init__(
        self,
        frame: GpuFrame,
        made: PlanBuffers | None,
        gather: NgramGather | None,
        pinned: bool,
    ) -> None:
        def host(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self._frame, self._gather = frame, gather
        none = torch.zeros((0, 0), dtype=torch.int32, device=frame.device)
        self._made = none, none.to(torch.int8)
        if made is not None:
            self._made = made.expert_LR, made.place_LR
        self._words = host(START_WORDS + frame.T, dtype=torch.int32)
        self._rows: torch.Tensor | None = None
        if gather is not None:
            self._rows = host(*frame["ngram_rows"].shape, dtype=torch.float32)
        like = (frame["choice"], *self._made)
        self._outs = tuple(host(*t.shape, dtype=t.dtype) for t in like)
        self.accepted = host(1, dtype=torch.int32)
        """Read by the commit of a part of a window."""
        # views: nothing is made between two windows
        self._start_words = self._words.numpy()
        self._choice_T2: npt.NDArray[np.int32] = self._outs[0].numpy()
        self.expert_LR: npt.NDArray[np.int32] = self._outs[1].numpy()
        """Experts and places of all routed rows, valid until the next window of this size."""
        self.place_LR: npt.NDArray[np.int8] = self._outs[2].numpy()

    def fill(self, front: int, start: int, previous: Sequence[int], tokens: Sequence[int]) -> None:
        """Before a launch, when the window before of this size has ended. front: the committed
        copy of recurrent state; start: position of the first token."""
        words = self._start_words
        words[0], words[1] = front, start
        words[START_WORDS:] = tokens
        if self._gather is not None:
            assert self._rows is not None
            self._rows.copy_(self._gather(previous, tokens))

    def take(self) -> None:
        """The graph's first launch."""
        frame = self._frame
        rows_out = None if self._rows is None else frame["ngram_rows"]
        take_in(self._words, self._rows, frame.state.which, frame.pos_T, frame["ids"], rows_out)

    def hand(self, ring: tuple[int, int] | None) -> None:
        """The graph's last launch; ring = (address of a word, value): the host is told."""
        hand_out(self._frame["choice"], *self._made, self._outs, ring)  # type: ignore[arg-type]

    def choice(self) -> Choice:
        """What the window's last launch left."""
        pairs = self._choice_T2.tolist()
        return Choice([best for best, _ in pairs], [bad == 0 for _, bad in pairs])
