"""The plain program of a window on a device, in the same steps as ``window/layer.py``.

    pre(l)   [ngram] -> attn_read -> mixer steps -> attn_write -> ffn_read -> router -> plan ->
             ring -> host -> shared_expert
    post(l)  gpu_rows -> wait_cpu -> add_cpu_rows -> combine -> ffn_write

The plan also writes what the host reads. attn_write and ffn_read are one kernel where nothing
stands between them, and so are plan and ring, and combine and ffn_write (``window/fuse.py``). When
every expert is resident there is no host in it: no payload, ring, wait or CPU rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from strata.core.types import Place
from strata.experts.device_service import DeviceService
from strata.kernels.combine.triton import ON_TIME, combine
from strata.kernels.rms_norm.triton import Pending
from strata.models.gpu.ffn import GpuMoe
from strata.models.gpu.frame import GpuFrame
from strata.models.gpu.network import GpuNetwork
from strata.models.gpu.rows import rows_of
from strata.window.build import ProgramBuilder
from strata.window.fuse import Fusion
from strata.window.program import Program, Wait, nothing

KEPT = ("logits", "choice", "ids", "ngram_rows", "expert", "place")


@dataclass(frozen=True)
class Meeting:
    """What ring and wait launch: kernels on a device, or the host's work itself without one."""

    ring: Callable[[int], None]
    """(layer)"""
    wait: Callable[[int, Place], None]
    """(layer, CPU or CPU_LATE)"""
    word: int | None = None
    """Address of the word that a ring raises, where the plan's kernel can ring itself."""


@dataclass(frozen=True)
class DeviceProgram:
    """A program and the pairs of its steps that one kernel can do."""

    program: Program
    fusions: list[Fusion] = field(default_factory=list)


def device_program(
    network: GpuNetwork, frame: GpuFrame, service: DeviceService, meeting: Meeting, host: bool
) -> DeviceProgram:
    """The whole window in order. host: whether rows may go to the CPU."""
    return _Builder(network, frame, service, meeting, host).build()


class _Builder:
    def __init__(
        self,
        network: GpuNetwork,
        frame: GpuFrame,
        service: DeviceService,
        meeting: Meeting,
        host: bool,
    ) -> None:
        self._net, self._frame, self._service = network, frame, service
        self._meeting, self._host = meeting, host
        n_layers = network.spec.n_layers
        self._steps = ProgramBuilder(frame, n_layers, network.owned_names(), KEPT)
        self._fusions: list[Fusion] = []
        hyper = network.spec.streams > 1
        self._coeff = {site: (f"coeff_{site}",) if hyper else () for site in ("attn", "ffn")}

    def build(self) -> DeviceProgram:
        net, frame, steps = self._net, self._frame, self._steps
        residual = net.residual
        steps.step("embed", 0, ("ids",), ("residual",), lambda: residual.embed(frame))
        for layer in range(net.spec.n_layers):
            self._mixer_half(layer)
            ffn = net.ffns[layer]
            if isinstance(ffn, GpuMoe):
                self._moe_pre(layer, ffn)
                self._moe_post(layer, ffn)
            else:
                steps.part(layer, ffn.part())
                self._write("ffn", layer)
        last = net.spec.n_layers
        steps.step("head_read", last, ("residual",), ("head_x",), lambda: residual.head(frame))
        steps.part(last, net.head_part())
        steps.part(last, net.choose_part())
        return DeviceProgram(steps.program(), self._fusions)

    def _mixer_half(self, layer: int) -> None:
        net, frame, steps = self._net, self._frame, self._steps
        residual, mixer = net.residual, net.mixers[layer]
        if layer in net.ngrams:
            steps.part(layer, net.ngrams[layer].part())
        steps.step(
            "attn_read",
            layer,
            ("residual",),
            ("x", *self._coeff["attn"]),
            lambda: residual.read("attn", layer, frame),
        )
        for part in mixer.parts():
            steps.part(layer, part)
        self._write("attn", layer, mixer.out_bias)
        steps.step(
            "ffn_read",
            layer,
            ("residual",),
            ("ffn_x", *self._coeff["ffn"]),
            lambda: residual.read("ffn", layer, frame),
        )

        def both() -> None:
            residual.read("ffn", layer, frame, self._pending("attn", mixer.out_bias))

        self._fusions.append(Fusion(layer, "attn_write", "ffn_read", "ffn_read", both))

    def _pending(self, site: str, bias: torch.Tensor | None = None) -> Pending:
        return self._net.residual.pending(site, self._frame, bias)  # type: ignore[arg-type]

    def _write(self, site: str, layer: int, bias: torch.Tensor | None = None) -> None:
        frame, residual = self._frame, self._net.residual
        source = "mixer_out" if site == "attn" else "ffn_out"
        self._steps.step(
            f"{site}_write",
            layer,
            ("residual", source, *self._coeff[site]),
            ("residual",),
            lambda: residual.write(frame, self._pending(site, bias)),
        )

    def _moe_pre(self, layer: int, ffn: GpuMoe) -> None:
        frame, service, steps = self._frame, self._service, self._steps
        steps.part(layer, ffn.router_part())
        meeting, host = self._meeting, self._host

        def plan(word: int | None = None) -> None:
            x_TD = frame["ffn_x"] if host else None
            service.plan(layer, frame.T, ffn.logits(frame), ffn.rule(), x_TD, word)

        reads = ("router_logits", "ffn_x") if host else ("router_logits",)
        writes = ("expert", "weight", "plan", *(("payload",) if host else ()))
        steps.step("plan", layer, reads, writes, plan)
        if host:
            ring = meeting.ring
            steps.step("ring", layer, ("payload",), (), lambda: ring(layer), rings=True)
            steps.step("host", layer, ("payload",), ("cpu_rows",), stream="host")

            def both() -> None:
                plan(meeting.word)
                if meeting.word is None:
                    ring(layer)

            self._fusions.append(Fusion(layer, "plan", "ring", "ring", both))
        shared = ffn.shared_part()
        if shared is not None:
            # beside the router, the plan and the ring: it needs nothing of theirs
            steps.part(layer, shared, stream="side")

    def _moe_post(self, layer: int, ffn: GpuMoe) -> None:
        frame, service, steps = self._frame, self._service, self._steps
        x = rows_of(frame, "ffn_x")
        steps.step(
            "gpu_rows",
            layer,
            ("ffn_x", "plan"),
            ("rows",),
            lambda: service.rows(layer, x.x, x.q, frame["rows"], missed=self._host),
        )
        if self._host:
            wait = self._meeting.wait
            steps.step(
                "wait_cpu",
                layer,
                (),
                (),
                lambda: wait(layer, Place.CPU),
                waits=(Wait("rows", layer),),
            )
            # rows of the CPU are read where the host wrote them
            reads = ("rows", "cpu_rows", "plan")
            steps.step("add_cpu_rows", layer, reads, ("rows",), nothing)
        shared = ("shared_out",) if ffn.has_shared else ()
        gate = ("shared_gate",) if ffn.has_gate else ()
        reads = ("rows", "weight", "plan", *shared, *gate)
        steps.step(
            "combine", layer, reads, ("ffn_out",), lambda: self._combine(layer, ffn, written=False)
        )
        self._write("ffn", layer)
        self._fusions.append(
            Fusion(
                layer,
                "combine",
                "ffn_write",
                "combine",
                lambda: self._combine(layer, ffn, written=True),
            )
        )

    def _combine(self, layer: int, ffn: GpuMoe, written: bool) -> None:
        frame, service, residual = self._frame, self._service, self._net.residual
        made = service.buffers(frame.T)
        n_rows = frame.T * ffn.spec.n_active
        combine(
            frame["rows"],
            made.weight_LR[layer, :n_rows],
            frame.T,
            place_R=made.place_LR[layer, :n_rows],
            places=ON_TIME,
            cpu_rows=service.handshake.rows_address if self._host else None,
            shared_TD=frame["shared_out"] if ffn.has_shared else None,
            shared_gate_T=frame["shared_gate"].view(-1) if ffn.has_gate else None,
            out_TD=None if written else frame["ffn_out"],
            residual=frame["residual"] if written else None,
            coeff_TC=residual.coeff("ffn", frame) if written else None,
        )
