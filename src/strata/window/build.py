"""Turns parts into steps: resolves which write each read means, and qualifies names with their
layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from strata.memory.frame import Frame
from strata.models.parts import Part
from strata.window.program import HOST_BUFFERS, Program, Read, Step, Stream, Wait, nothing


class ProgramBuilder:
    """Collects steps in order. A read means the latest write before it; state and inputs: what was
    there before.

    owned: names that exist once per layer (state, kept inputs); they are qualified as "name:layer".
    """

    def __init__(
        self, frame: Frame, n_layers: int, owned: Iterable[str], kept: Iterable[str]
    ) -> None:
        self.frame = frame
        self.n_layers = n_layers
        self._owned = frozenset(owned)
        self._kept = frozenset(kept)
        self._steps: list[Step] = []
        self._last: dict[str, str] = {}

    def part(self, layer: int, part: Part, stream: Stream = "main") -> None:
        """Append a model's part as a step."""
        frame = self.frame
        run = part.run
        self.step(part.name, layer, part.reads, part.writes, lambda: run(frame), stream=stream)

    def step(
        self,
        name: str,
        layer: int,
        reads: Iterable[str],
        writes: Iterable[str],
        launch: Callable[[], None] = nothing,
        *,
        waits: tuple[Wait, ...] = (),
        rings: bool = False,
        stream: Stream = "main",
    ) -> None:
        """Append a step; reads are resolved to the latest write."""
        resolved = tuple(
            Read(q, self._last.get(q)) for q in (self._qualified(r, layer) for r in reads)
        )
        written = tuple(self._qualified(w, layer) for w in writes)
        step = Step(name, layer, resolved, written, waits, rings, stream, launch)
        self._steps.append(step)
        for buffer in written:
            self._last[buffer] = step.id

    def _qualified(self, name: str, layer: int) -> str:
        return f"{name}:{layer}" if name in self._owned else name

    def program(self) -> Program:
        """The finished list."""
        owned = {b for s in self._steps for b in s.writes if b.split(":")[0] in self._owned}
        return Program(self.frame.T, self.n_layers, tuple(self._steps), self._kept | owned)


__all__ = ["HOST_BUFFERS", "ProgramBuilder"]
