"""State repair in a window on a device: the steps of ``window/repair.py`` with their kernels.

Nothing here is new to the mixers: a repair runs their own products and state kernels again on the
corrected rows. A recurrent layer thereby leaves the state after all of the window's repaired tokens
beside the committed one, as its window did before, so commit stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from strata.memory.frame import Frame
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.network import GpuNetwork
from strata.window.device_layer import DeviceProgram, Meeting
from strata.window.repair import REPAIR_X, RepairSteps

ROWS = "repair_rows"
"""x_r, made and used inside a repair."""


class DeviceRepair(RepairSteps):
    """The transformation behind ``DeviceDefer`` for the same layers."""

    def __init__(self, network: GpuNetwork, layers: Sequence[int]) -> None:
        super().__init__(layers, own_injection=network.spec.streams > 1)
        self._net = network

    def __call__(self, built: DeviceProgram, frame: GpuFrame, meeting: Meeting) -> DeviceProgram:
        """The program with repair; the frame gets the corrected rows."""
        frame.add(self._net.residual.corrected_specs(REPAIR_X, ROWS))
        return replace(built, program=self.repaired(built.program, frame))

    def written(self, frame: Frame, layer: int) -> Iterable[str]:
        """Everything the mixer's own state steps write."""
        mixer, nxt = self._net.mixers[layer + 1], layer + 1
        owned = self._net.owned_names()
        return [f"{n}:{nxt}" if n in owned else n for n in mixer.rewrites()]

    def correct(self, frame: Frame, layer: int) -> None:
        """The coefficients, and what x_r is made of: no more than the mixer's write waits for."""
        self._net.residual.corrected(layer + 1, frame, REPAIR_X)

    def rewrite(self, frame: Frame, layer: int) -> None:
        """x_r, then products and state kernels once more."""
        x_r = self._net.residual.corrected_input(layer + 1, frame, REPAIR_X, ROWS)
        self._net.mixers[layer + 1].rewrite(frame, x_r)
