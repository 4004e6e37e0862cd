"""Deferral: a layer's late CPU rows join at the next layer's FFN half, so that CPU and GPU overlap.

    mode "1"      combine(l) goes without the late rows; after layer l + 1's mixer has written its
    result, the rows are
                  waited for and added with layer l's routing weights and write coefficients, before
                  the FFN read.
    mode "check"  the same steps, but right after layer l's own write: the default's sums in another
    order.

A transformation of the step list: no state at run time, and without it no step, buffer or rule
exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from strata.core.log import LOG
from strata.core.types import Place
from strata.experts.service import ExpertService
from strata.kernels.combine import combine
from strata.memory.frame import BufferSpec, Frame
from strata.models.network import MoeFfn, Network
from strata.window.late_layers import Mode, deferrable_layers
from strata.window.program import Program, Read, Step, Wait

LATE_ROWS = "cpu_rows_late"


def late_buffers(network: Network) -> dict[str, BufferSpec]:
    """The one extra buffer, carved after every other."""
    return {LATE_ROWS: BufferSpec((network.spec.d_model,), network.dtype, lead="R")}


def deferrable(network: Network) -> list[int]:
    """``deferrable_layers`` of a network."""
    return deferrable_layers(network.spec)


class Defer:
    """The transformation for a set of layers. split: some rows of these layers stay on time."""

    def __init__(
        self,
        network: Network,
        service: ExpertService,
        layers: Sequence[int],
        mode: Mode,
        split: bool,
    ) -> None:
        allowed = set(deferrable(network))
        assert allowed.issuperset(layers), f"layers {sorted(set(layers) - allowed)} cannot be late"
        self._network = network
        self._service = service
        self.layers = sorted(layers)
        self._mode = mode
        self._split = split

    def __call__(self, program: Program, frame: Frame) -> Program:
        """The program with the late rows of every chosen layer moved."""
        how = "not deferred: no expert of its layers is missed" if self._resident() else "deferred"
        LOG.info("strata verify: capturing the %d-token window, %s", program.n_tokens, how)
        for layer in self.layers:
            program = self._move(program, frame, layer)
        return program

    def _resident(self) -> bool:
        """Whether every expert of the layers is in the fast tier, so that no row is ever late."""
        return all((self._service.tier.address_LE[layer] != 0).all() for layer in self.layers)

    def _move(self, program: Program, frame: Frame, layer: int) -> Program:
        behind = f"ffn_write:{layer}" if self._mode == "check" else f"attn_write:{layer + 1}"
        wait, join = self._late_steps(frame, layer, behind)
        steps: list[Step] = []
        for step in program.steps:
            if step.id == f"host:{layer}":
                kept = step.writes if self._split else ()
                step = replace(step, writes=(*kept, LATE_ROWS))
            elif not self._split and step.id in (f"wait_cpu:{layer}", f"add_cpu_rows:{layer}"):
                continue
            elif not self._split and step.id == f"combine:{layer}":
                step = _reads_instead(step, "rows", f"gpu_rows:{layer}")
            steps.append(step)
            if step.id == behind:
                steps += [wait, join]
        return program.edited(_see_join(steps, behind, join))

    def _late_steps(self, frame: Frame, layer: int, behind: str) -> tuple[Step, Step]:
        wait = Step(
            "wait_late",
            layer,
            waits=(Wait("rows_late", layer),),
            launch=lambda: self._service.wait(layer, Place.CPU_LATE),
        )
        hyper = self._network.spec.streams > 1
        reads = (
            Read("residual", behind),
            Read(LATE_ROWS, f"host:{layer}"),
            Read("weight", f"router:{layer}"),
            Read("plan", f"plan:{layer}"),
            *((Read("coeff_ffn", f"ffn_read:{layer}"),) if hyper else ()),
        )
        join = Step(
            "late_join", layer, reads, ("residual",), launch=lambda: self._join(frame, layer)
        )
        return wait, join

    def _join(self, frame: Frame, layer: int) -> None:
        plan = self._service.of(layer)
        if Place.CPU_LATE not in plan.groups:
            return
        ffn = self._network.ffns[layer]
        assert isinstance(ffn, MoeFfn)
        n_active = ffn.spec.n_active
        n_rows = frame.T * n_active
        valid = torch.from_numpy(plan.place_R == Place.CPU_LATE)
        weight_TK = frame["weight"][:n_rows].view(frame.T, n_active)
        late_TD = combine(frame[LATE_ROWS][:n_rows], weight_TK, valid)
        coeff = frame["coeff_ffn"] if self._network.spec.streams > 1 else None
        self._network.residual.add_late(frame["residual"], coeff, late_TD)


def _reads_instead(step: Step, buffer: str, writer: str) -> Step:
    reads = tuple(Read(buffer, writer) if r.buffer == buffer else r for r in step.reads)
    return replace(step, reads=reads)


def _see_join(steps: list[Step], behind: str, join: Step) -> list[Step]:
    """Whoever read the residual as ``behind`` wrote it, from the join on, reads it as the join
    wrote it."""
    at = steps.index(join)
    wanted = Read("residual", behind)
    return [
        replace(s, reads=tuple(Read("residual", join.id) if r == wanted else r for r in s.reads))
        if i > at
        else s
        for i, s in enumerate(steps)
    ]
