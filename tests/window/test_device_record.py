"""Where the side stream of a device's window meets the main one.

Expectation: the definition. Two steps of different streams that share a buffer, one of them
writing it, are ordered by a chain of list order within a stream and of the waits; found here by
reachability.
"""

from __future__ import annotations

import random

from strata.window.device_record import meetings
from strata.window.program import Read, Step, Stream


def step(i: int, stream: Stream, reads: str, writes: str) -> Step:
    return Step(f"s{i}", 0, tuple(Read(b, None) for b in reads), tuple(writes), stream=stream)


def ordered(steps: list[Step], before: dict[int, int]) -> set[tuple[int, int]]:
    """Pairs (i, j) where j's end is certain before i begins."""
    known: list[set[int]] = []
    for i, one in enumerate(steps):
        own = [j for j in range(i) if steps[j].stream == one.stream]
        direct = own[-1:] + ([before[i]] if before.get(i, -1) >= 0 else [])
        known.append(set(direct).union(*(known[j] for j in direct)))
    return {(i, j) for i, earlier in enumerate(known) for j in earlier}


def test_steps_that_share_a_buffer_are_ordered_and_the_side_stream_begins_in_the_window() -> None:
    chance = random.Random(3)
    waits = 0
    for _ in range(300):
        steps = [
            step(
                i,
                "side" if chance.random() < 0.3 else "main",
                "".join(chance.sample("abcdef", 2)),
                "".join(chance.sample("abcdef", 1)),
            )
            for i in range(12)
        ]
        plan = meetings(steps)
        sure = ordered(steps, plan.before)
        for i, late in enumerate(steps):
            for j, early in enumerate(steps[:i]):
                shared = {r.buffer for r in late.reads} | set(late.writes)
                touched = shared & set(early.writes) | set(late.writes) & {
                    r.buffer for r in early.reads
                }
                assert not touched or (i, j) in sure, (steps, i, j)
        sides = [i for i, s in enumerate(steps) if s.stream == "side"]
        assert all(i in plan.before for i in sides)
        end = {
            i
            for i in sides
            if (len(steps), i)
            in ordered(
                [*steps, step(99, "main", "", "")],
                {**plan.before, **({len(steps): plan.at_end} if plan.at_end is not None else {})},
            )
        }
        assert end == set(sides), "the window ends before its side stream"
        waits += len(plan.before) - len(sides)
    assert waits < 300 * 4  # and main does not wait at every step


def test_a_step_beside_the_router_starts_when_its_input_is_there() -> None:
    steps = [
        step(0, "main", "", "x"),
        step(1, "main", "x", "p"),
        step(2, "main", "p", "r"),
        step(3, "side", "x", "s"),
        step(4, "main", "p", "q"),
        step(5, "main", "sq", "o"),
    ]
    plan = meetings(steps)
    assert plan.before == {3: 0, 5: 3} and plan.noted == {0, 3} and plan.at_end is None
