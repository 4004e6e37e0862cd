"""Repair: tokens whose layer l rows were late leave layer l + 1 the state they would have left.

A transformation of a deferred program (``window/defer.py``). With R the streams that layer l + 1's
mixer read and late_l the rows that were missing:
- the late join moves in front of the mixer's write, so the streams are then Rc = R + w_l late_l;
- ``correct``: x_r = READ(Rc) is kept, and with hyper-connections the mixer writes with the
  coefficients of that read instead of R's (own injection). Plain residuals have none.
- ``repair``, off the critical path: what the window's tokens leave behind is written again from
  x_r: keys, values, index keys and the block keys they complete, columns of the convolution, and
  the inputs of the recurrence, from which commit moves the recurrent state on. The tokens' own
  mixer outputs stay as they were.

``repair`` of layer l + 1 stands in front of the first wait behind that layer's ring, where the
device would only wait for the host. Nothing is pending between windows: rejected tokens' entries
are overwritten like any others, and the recurrence only sees accepted tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from strata.core.types import Place
from strata.experts.service import ExpertService
from strata.memory.frame import BufferSpec, Frame
from strata.models.network import Network
from strata.window.program import Program, Read, Step

REPAIR_X = "repair_x"


def repair_buffers(network: Network) -> dict[str, BufferSpec]:
    """The corrected mixer input."""
    return {REPAIR_X: BufferSpec((network.spec.d_model,), network.dtype)}


class RepairSteps:
    """The order of the steps; who derives from it says what they do and write.

    layers: the deferred ones. own_injection: whether ``correct`` gives new write coefficients.
    """

    def __init__(self, layers: Sequence[int], own_injection: bool) -> None:
        self.layers = sorted(layers)
        self._own = own_injection

    def repaired(self, program: Program, frame: Frame) -> Program:
        """The program in which every chosen layer's successor repairs its state."""
        for layer in self.layers:
            program = self._join_first(program, frame, layer)
        for layer in self.layers:
            program = self._repaired(program, frame, layer)
        return program

    def correct(self, frame: Frame, layer: int) -> None:
        """READ of the streams that now hold the rows of ``layer``, for the layer after it."""
        raise NotImplementedError

    def rewrite(self, frame: Frame, layer: int) -> None:
        """The state of the layer after ``layer`` again, from the corrected input."""
        raise NotImplementedError

    def written(self, frame: Frame, layer: int) -> Iterable[str]:
        """Qualified names of what ``rewrite`` of the layer after ``layer`` writes."""
        raise NotImplementedError

    def _join_first(self, program: Program, frame: Frame, layer: int) -> Program:
        """Wait and join in front of the mixer's write, then ``correct``."""
        nxt = layer + 1
        join_id, write_id = f"late_join:{layer}", f"attn_write:{nxt}"
        wait = program.steps[program.index(f"wait_late:{layer}")]
        join = program.steps[program.index(join_id)]
        # the coefficients stay as they were read when no row was late
        kept = (Read("coeff_attn", f"attn_read:{nxt}"),) if self._own else ()
        correct = Step(
            "correct",
            nxt,
            (Read("residual", join_id), *kept),
            (REPAIR_X, *(("coeff_attn",) if self._own else ())),
            launch=lambda: self.correct(frame, layer),
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
        repair = Step(
            "repair",
            nxt,
            (Read(REPAIR_X, f"correct:{nxt}"),),
            tuple(self.written(frame, layer)),
            launch=lambda: self.rewrite(frame, layer),
        )
        steps = list(program.steps)
        at = program.index(f"correct:{nxt}")
        # in front of the first wait behind it: there the device has nothing else to do
        waits = (i for i, step in enumerate(steps) if i > at and step.waits)
        steps.insert(next(waits, program.index(f"ffn_write:{nxt}") + 1), repair)
        return program.edited(steps)


class Repair(RepairSteps):
    """The transformation for windows on the CPU."""

    def __init__(
        self,
        network: Network,
        service: ExpertService,
        layers: Sequence[int],
        own_injection: bool = True,
    ) -> None:
        super().__init__(layers, own_injection and network.spec.streams > 1)
        self._network = network
        self._service = service

    def __call__(self, program: Program, frame: Frame) -> Program:
        """The repaired program; commit learns whose kept inputs are replaced."""
        frame.rewritten |= {i + 1 for i in self.layers if self._network.mixers[i + 1].kept(frame)}
        return self.repaired(program, frame)

    def written(self, frame: Frame, layer: int) -> Iterable[str]:
        """State but the recurrent one, and the kept inputs of that."""
        mixer = self._network.mixers[layer + 1]
        names = [*mixer.state(), *(n for n, b in mixer.buffers().items() if b.per_layer)]
        return [f"{name}:{layer + 1}" for name in names if name != "recurrent"]

    def correct(self, frame: Frame, layer: int) -> None:
        """x_r, and the coefficients; nothing when no row was late: it would change no bit."""
        if self._was_late(layer):
            coeff = frame["coeff_attn"] if self._own else None
            x_TD = frame[REPAIR_X]
            self._network.residual.mixer_input(layer + 1, frame["residual"], x_TD, coeff)

    def rewrite(self, frame: Frame, layer: int) -> None:
        """The mixer's state again; nothing when no row was late."""
        if self._was_late(layer):
            mixer = self._network.mixers[layer + 1]
            mixer.rewrite(frame.state, frame.start, frame[REPAIR_X], mixer.kept(frame))

    def _was_late(self, layer: int) -> bool:
        return Place.CPU_LATE in self._service.of(layer).groups


def _reading(step: Step, writers: dict[str, str]) -> Step:
    """The step with other writers of some of the buffers it reads."""
    reads = tuple(Read(r.buffer, writers.get(r.buffer, r.writer)) for r in step.reads)
    return replace(step, reads=reads)
