"""How a checked program is carried out: eagerly, step by step; with poison, to prove that nothing
stale is read.

A recorder is a function Program -> callable. The graph recorder for GPUs belongs here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from strata.window.program import HOST_BUFFERS, Program


def eager(program: Program) -> Callable[[], None]:
    """Run the launches in list order."""
    launches = tuple(step.launch for step in program.steps if step.stream != "host")

    def run() -> None:
        for launch in launches:
            launch()

    return run


def poisoned(program: Program, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Eager, but every buffer is spoilt after its last declared reader, and host-written rows at
    the ring.

    A step that reads what it did not declare, or an undeclared overwrite, then shows as NaN in the
    logits.
    """
    after = _last_readers(program)

    def run() -> None:
        for i, step in enumerate(program.steps):
            if step.stream == "host":
                continue
            if step.rings:
                host = program.steps[i + 1]
                for name in host.writes:
                    spoil(tensors.get(name))
            step.launch()
            for name in after[i]:
                spoil(tensors.get(name))

    return run


def spoil(tensor: torch.Tensor | None) -> None:
    """Fill with values no right program can hide: NaN, or an impossible index."""
    if tensor is None:
        return
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype in (torch.int32, torch.int64):
        tensor.fill_(-(2**30))


def _last_readers(program: Program) -> list[list[str]]:
    """For each step, the buffers that nobody reads again before they are rewritten."""
    mentions = [{r.buffer for r in s.reads} for s in program.steps]
    for i, step in enumerate(program.steps):
        if step.stream == "host":  # the host reads until the last wait for its layer
            waits = [
                j
                for j, s in enumerate(program.steps)
                if any(w.layer == step.layer for w in s.waits)
            ]
            mentions[max(waits, default=i)] |= mentions[i]
    after: list[list[str]] = [[] for _ in program.steps]
    alive: set[str] = set()
    for i in range(len(program.steps) - 1, -1, -1):
        written = set(program.steps[i].writes)
        after[i] = sorted((mentions[i] | written) - alive - program.kept - HOST_BUFFERS.keys())
        alive = (alive - written) | mentions[i]
    return after
