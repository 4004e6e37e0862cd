"""Repair: tokens whose layer l rows were late leave layer l + 1 the state they would have left.

A transformation of a deferred program (``window/defer.py``). With R the streams that layer l + 1's
mixer read and late_l the rows that were missing:
- the late join moves in front of the mixer's write, so the streams are then Rc = R + w_l late_l;
- ``correct``: Rc is kept, and with hyper-connections the mixer writes with the coefficients of Rc
  instead of R's (own injection). Plain residuals have none.
- ``repair``, off the critical path: x_r = READ(Rc), and what the window's tokens leave behind is
  written again from x_r: keys, values, index keys and the block keys they complete, columns of the
  convolution, and the inputs of the recurrence, from which commit moves the recurrent state on.
  The tokens' own mixer outputs stay as they were.

``repair`` of layer l + 1 stands in front of the first wait behind that layer's ring, where the
device would only wait for the host. Nothing is pending between windows: rejected tokens' entries
are overwritten like any others, and the recurrence only sees accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata.core.types import Place
from strata.experts.service import ExpertService
from strata.memory.frame import BufferSpec, Frame
from strata.models.network import Network
from strata.window.program import Program, Read, Step

LATE_RESIDUAL = "late_residual"
REPAIR_X = "repair_x"


def repair_buffers(network: Network) -> dict[str, BufferSpec]:
    """The corrected streams, and the mixer input that follows from them."""
    wide = BufferSpec((network.spec.d_model,), network.dtype)
    return {LATE_RESIDUAL: network.residual.buffers()["residual"], REPAIR_X: wide}


class Repair:
    """The transformation for deferred layers. own_injection: recompute the write coefficients."""

    def __init__(
        self,
        network: Network,
        service: ExpertService,
        layers: Sequence[int],
        own_injection: bool = True,
    ) -> None:
        self._network = network
        self._service = service
        self.layers = sorted(layers)
        self._own = own_injection and network.spec.streams > 1

    def __call__(self, program: Program, frame: Frame) -> Program:
        """The program in which every chosen layer's successor repairs its state."""
        for layer in self.layers:
            program = self._join_first(program, frame, layer)
        for layer in self.layers:
            program = self._repaired(program, frame, layer)
            if self._network.mixers[layer + 1].kept(frame):
                frame.rewritten.add(layer + 1)
        return program

    def _join_first(self, program: Program, frame: Frame, layer: int) -> Program:
        """Wait and join in front of the mixer's write, then ``correct``."""
        nxt = layer + 1
        join_id, write_id = f"late_join:{layer}", f"attn_write:{nxt}"
        wait = program.steps[program.index(f"wait_late:{layer}")]
        join = program.steps[program.index(join_id)]
        correct = Step(
            "correct",
            nxt,
            (Read("residual", join_id),),
            (LATE_RESIDUAL, *(("coeff_attn",) if self._own else ())),
            launch=lambda: self._correct(frame, nxt),
        )
        seen = {"residual": join_id} | ({"coeff_attn": correct.id} if self._own else {})
        steps: list[Step] = []
        for step in program.steps:
            if step.id in (wait.id, join.id):
                continue
            if step.id == write_id:
                steps += [wait, _reading(join, {"residual": f"ffn_write:{layer}"}), correct]
                step = _reading(step, seen)
            elif Read("residual", join_id) in step.reads:
                step = _reading(step, {"residual": write_id})
            steps.append(step)
        return program.edited(steps)

    def _repaired(self, program: Program, frame: Frame, layer: int) -> Program:
        nxt = layer + 1
        mixer = self._network.mixers[nxt]
        names = [*mixer.state(), *(n for n, b in mixer.buffers().items() if b.per_layer)]
        written = [n for n in names if n != "recurrent"]
        repair = Step(
            "repair",
            nxt,
            (Read(LATE_RESIDUAL, f"correct:{nxt}"),),
            (REPAIR_X, *(f"{n}:{nxt}" for n in written)),
            launch=lambda: self._repair(frame, layer),
        )
        steps = list(program.steps)
        at = program.index(f"correct:{nxt}")
        # in front of the first wait behind it: there the device has nothing else to do
        waits = (i for i, step in enumerate(steps) if i > at and step.waits)
        steps.insert(next(waits, program.index(f"ffn_write:{nxt}") + 1), repair)
        return program.edited(steps)

    def _correct(self, frame: Frame, layer: int) -> None:
        frame[LATE_RESIDUAL].copy_(frame["residual"])
        if self._own:
            residual = self._network.residual
            residual.mixer_coefficients(layer, frame[LATE_RESIDUAL], frame["coeff_attn"])

    def _repair(self, frame: Frame, layer: int) -> None:
        if Place.CPU_LATE not in self._service.of(layer).groups:
            return  # nothing was late: the state is right already
        mixer, x_TD = self._network.mixers[layer + 1], frame[REPAIR_X]
        self._network.residual.mixer_input(layer + 1, frame[LATE_RESIDUAL], x_TD)
        mixer.rewrite(frame.state, frame.start, x_TD, mixer.kept(frame))


def _reading(step: Step, writers: dict[str, str]) -> Step:
    """The step with other writers of some of the buffers it reads."""
    reads = tuple(Read(r.buffer, writers.get(r.buffer, r.writer)) for r in step.reads)
    return replace(step, reads=reads)
