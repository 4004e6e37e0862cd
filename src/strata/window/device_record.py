"""Carrying a program out on a device: eagerly, or recorded once as a CUDA graph and replayed.

A recorder is a function (launches) -> callable; ``eager`` of ``window/record.py`` is one too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from strata.window.program import Program, Step
from strata.window.record import eager

Launch = Callable[[], None]


def graph(launch: Launch) -> Launch:
    """What ``launch`` launches, as one graph. It has run once before, so that every kernel is
    compiled and loaded; nothing in it may synchronise or read the device."""
    recorded = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(recorded, stream=stream, capture_error_mode="thread_local"):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    return recorded.replay


@dataclass(frozen=True)
class Meetings:
    """Where two streams meet, by step numbers: before[i]: steps of the other stream whose end step
    i waits for; noted: steps whose end somebody waits for; at_end: side steps that nobody has."""

    before: dict[int, int]
    noted: frozenset[int]
    at_end: int | None


def meetings(steps: Sequence[Step]) -> Meetings:
    """A side step waits for the last main step before it that it shares a buffer with (-1: for the
    window's begin), and a main step for the last side step likewise, unless that was waited for
    already. Sharing means that one of the two writes it."""
    before: dict[int, int] = {}
    met = {"main": -1, "side": -1}
    for i, step in enumerate(steps):
        other = "side" if step.stream == "main" else "main"
        found = [j for j in range(i) if steps[j].stream == other and _share(steps[j], step)]
        last = max(found, default=-1)
        if step.stream == "side" or last > met[other]:
            before[i] = last
            met[other] = max(met[other], last)
    side = [i for i, step in enumerate(steps) if step.stream == "side"]
    at_end = side[-1] if side and side[-1] > met["side"] else None
    noted = {j for j in before.values() if j >= 0} | ({at_end} if at_end is not None else set())
    return Meetings(before, frozenset(noted), at_end)


def _share(one: Step, two: Step) -> bool:
    reads = ({r.buffer for r in one.reads}, {r.buffer for r in two.reads})
    writes = (set(one.writes), set(two.writes))
    return bool(writes[0] & (reads[1] | writes[1]) or writes[1] & reads[0])


def side_by_side(program: Program) -> Launch:
    """Run the launches in list order, those of the side stream beside the main one's."""
    steps = [step for step in program.steps if step.stream != "host"]
    if all(step.stream == "main" for step in steps):
        return eager(program)
    plan = meetings(steps)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ended = {i: torch.cuda.Event() for i in (-1, *sorted(plan.noted))}  # type: ignore[no-untyped-call]

    def run() -> None:
        main = torch.cuda.current_stream()
        ended[-1].record(main)
        for i, step in enumerate(steps):
            stream = side if step.stream == "side" else main
            if i in plan.before:
                stream.wait_event(ended[plan.before[i]])
            with torch.cuda.stream(stream):
                step.launch()
                if i in plan.noted:
                    ended[i].record(stream)
        if plan.at_end is not None:
            main.wait_event(ended[plan.at_end])

    return run


def stream_trouble() -> str | None:
    """Why the current stream will not go on, or None while it runs."""
    try:
        done = torch.cuda.current_stream().query()
    except RuntimeError as error:
        return f"the device reports: {error}"
    return "the window ended without its last ring" if done else None
