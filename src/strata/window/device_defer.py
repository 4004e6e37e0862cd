"""Deferral in a window on a device: the steps of ``window/defer.py`` with their kernels.

A transformation: without it no step exists. The late rows lie where the host wrote them; one kernel
weighs them and adds them to the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata.core.types import Place
from strata.experts.device_service import DeviceService
from strata.kernels.combine.triton import combine
from strata.memory.frame import Frame
from strata.models.gpu.ffn import GpuMoe
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.network import GpuNetwork
from strata.window.defer import LATE_ROWS, Defer
from strata.window.device_layer import DeviceProgram, Meeting
from strata.window.late_layers import Mode
from strata.window.program import Read, Step, Wait


class DeviceDefer:
    """The transformation for a set of layers. split: some rows of these layers stay on time."""

    def __init__(
        self,
        network: GpuNetwork,
        service: DeviceService,
        layers: Sequence[int],
        mode: Mode,
        split: bool,
    ) -> None:
        self._network, self._service = network, service
        self.layers, self._mode, self._split = sorted(layers), mode, split

    def __call__(self, built: DeviceProgram, frame: GpuFrame, meeting: Meeting) -> DeviceProgram:
        """The program with the late rows of every chosen layer moved."""
        bound = _Bound(self._network, self._service, meeting)
        bound.layers, bound._mode, bound._split = self.layers, self._mode, self._split
        return replace(built, program=bound(built.program, frame))


class _Bound(Defer):
    """Defer whose two new steps are kernels."""

    def __init__(self, network: GpuNetwork, service: DeviceService, meeting: Meeting) -> None:
        self._net, self._rows, self._meeting = network, service, meeting

    def _resident(self) -> bool:
        return False  # with every expert resident a window has no host and no transformation

    def _late_steps(self, frame: Frame, layer: int, behind: str) -> tuple[Step, Step]:
        meeting, hyper = self._meeting, self._net.spec.streams > 1
        wait = Step(
            "wait_late",
            layer,
            waits=(Wait("rows_late", layer),),
            launch=lambda: meeting.wait(layer, Place.CPU_LATE),
        )
        reads = (
            Read("residual", behind),
            Read(LATE_ROWS, f"host:{layer}"),
            Read("weight", f"plan:{layer}"),
            Read("plan", f"plan:{layer}"),
            *((Read("coeff_ffn", f"ffn_read:{layer}"),) if hyper else ()),
        )
        join = Step(
            "late_join", layer, reads, ("residual",), launch=lambda: self._join(frame, layer)
        )
        return wait, join

    def _join(self, frame: Frame, layer: int) -> None:
        ffn = self._net.ffns[layer]
        assert isinstance(ffn, GpuMoe)
        made, n_rows = self._rows.buffers(frame.T), frame.T * ffn.spec.n_active
        combine(
            frame["rows"],
            made.weight_LR[layer, :n_rows],
            frame.T,
            place_R=made.place_LR[layer, :n_rows],
            places=(Place.CPU_LATE,),
            cpu_rows=self._rows.handshake.late_address,
            residual=frame["residual"],
            coeff_TC=self._net.residual.coeff("ffn", frame),
        )
