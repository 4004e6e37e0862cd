"""Two steps that one kernel can do become one, where they stand side by side.

The last transformation of a device's program: features that put a step between the two (deferral,
repair) thereby keep them apart, and know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strata.window.program import Program, Read, Step


@dataclass(frozen=True)
class Fusion:
    """``first`` and ``second`` (names) of a layer become one step called ``name``."""

    layer: int
    first: str
    second: str
    name: str
    launch: Callable[[], None]


def fuse(program: Program, fusions: Sequence[Fusion]) -> Program:
    """The program with every pair that is (still) side by side made one step."""
    by_first = {f"{f.first}:{f.layer}": f for f in fusions}
    steps: list[Step] = []
    renamed: dict[str, str] = {}
    i = 0
    while i < len(program.steps):
        step = program.steps[i]
        fusion = by_first.get(step.id)
        after = program.steps[i + 1] if i + 1 < len(program.steps) else None
        if fusion is not None and after is not None and after.id == f"{fusion.second}:{step.layer}":
            step = _merged(step, after, fusion)
            renamed[program.steps[i].id] = renamed[after.id] = step.id
            i += 1
        steps.append(step)
        i += 1
    return program.edited(_with_names(step, renamed) for step in steps)


def _merged(first: Step, second: Step, fusion: Fusion) -> Step:
    inner = set(first.writes)
    reads = list(first.reads)
    reads += [r for r in second.reads if not (r.buffer in inner and r.writer == first.id)]
    unique = tuple(dict.fromkeys(reads))
    writes = tuple(dict.fromkeys((*first.writes, *second.writes)))
    return replace(
        second,
        name=fusion.name,
        reads=unique,
        writes=writes,
        waits=(*first.waits, *second.waits),
        launch=fusion.launch,
    )


def _with_names(step: Step, renamed: dict[str, str]) -> Step:
    reads = tuple(
        Read(r.buffer, renamed.get(r.writer, r.writer) if r.writer else None) for r in step.reads
    )
    return replace(step, reads=reads) if reads != step.reads else step
