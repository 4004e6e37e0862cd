"""Routed experts as they lie in a checkpoint, behind one face whatever the layout.

Knows no stores and no places.

Rows keep the file's own type and are views where the layout allows it. proj is "gate", "up" or
"down"; gate and up are [F, D], down is [D, F], one matrix per expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.models.expert_layouts import PROJS, ExpertLayout, Proj

__all__ = ["PROJS", "CheckpointExperts", "ExpertSource", "Proj"]


class ExpertSource(Protocol):
    """All routed experts of one model."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        ...

    @property
    def n_experts(self) -> int:
        """Experts of such a layer."""
        ...

    def types(self, layer: int) -> tuple[str, str, str]:
        """Weight types of gate, up and down."""
        ...

    def rows(self, layer: int, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """One expert's matrix, uint8 [n_rows, row_bytes]."""
        ...

    def bias(self, layer: int, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """One expert's bias, f32 [n_rows]; None when the model has none."""
        ...

    def scale(self, layer: int, expert: int, proj: Proj) -> float:
        """Multiplies every output row once (NVFP4); 1.0 otherwise."""
        ...

    def tensor_names(self) -> tuple[str, ...]:
        """Every file tensor the experts need, whether or not the file has it."""
        ...

    def check(self) -> None:
        """Check shapes and types of the tensors, all present; FormatError names both shapes."""
        ...


class CheckpointExperts:
    """The ExpertSource over a checkpoint: one layout object per layer."""

    def __init__(self, layouts: Mapping[int, ExpertLayout], n_experts: int) -> None:
        self._layouts = dict(sorted(layouts.items()))
        self.n_experts = n_experts

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(self._layouts)

    def types(self, layer: int) -> tuple[str, str, str]:
        """Weight types of gate, up and down."""
        layout = self._layouts[layer]
        return layout.type("gate"), layout.type("up"), layout.type("down")

    def rows(self, layer: int, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """One expert's matrix, uint8 [n_rows, row_bytes]."""
        assert 0 <= expert < self.n_experts, f"expert {expert} of {self.n_experts}"
        return self._layouts[layer].rows(expert, proj)

    def bias(self, layer: int, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """One expert's bias, f32 [n_rows]; None when the model has none."""
        return self._layouts[layer].bias(expert, proj)

    def scale(self, layer: int, expert: int, proj: Proj) -> float:
        """Multiplies every output row once (NVFP4); 1.0 otherwise."""
        return self._layouts[layer].scale(expert, proj)

    def tensor_names(self) -> tuple[str, ...]:
        """Every file tensor the experts need, whether or not the file has it."""
        return tuple(n for layout in self._layouts.values() for n in layout.tensor_names())

    def check(self) -> None:
        """Check shapes and types of the tensors, all present; FormatError names both shapes."""
        for layout in self._layouts.values():
            layout.check()
