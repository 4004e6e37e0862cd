"""Two steps that one kernel does: joined only side by side, and every rule still holds for the one.

Expectations: the rules of ``check`` (tests/window/test_program.py has each by itself).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.window.test_program import LAST, make

from strata.core.errors import ProgramError
from strata.window.fuse import Fusion, fuse
from strata.window.program import Program, Step, check, nothing

PAIRS = (("publish", "ring"), ("combine", "ffn_write"))


def fused(program: Program) -> Program:
    layers = range(LAST + 1)
    return fuse(program, [Fusion(i, a, b, b, nothing) for i in layers for a, b in PAIRS])


def test_two_steps_become_one_that_reads_writes_and_rings_as_both_did() -> None:
    program = fused(make())
    check(program)
    own = {step.name: step for step in program.steps if step.layer == 1}
    assert not own.keys() & {"publish", "combine"}
    assert own["ring"].rings and own["ring"].writes == ("payload",)
    assert {r.buffer for r in own["ring"].reads} == {"ffn_x", "plan"}
    assert {r.buffer for r in own["ffn_write"].reads} == {"weight", "cpu_rows", "residual"}


def test_a_step_between_keeps_two_apart() -> None:
    program = make()
    at = program.index("ring:1")
    between = program.edited([*program.steps[:at], Step("rogue", 1), *program.steps[at:]])
    names = [step.name for step in fused(between).steps if step.layer == 1]
    assert names[names.index("rogue") - 1 :][:3] == ["publish", "rogue", "ring"]


def test_a_removed_wait_and_an_early_overwrite_are_found_around_the_one() -> None:
    program = fused(make((0,)))
    no_wait = [s for s in program.steps if s.id != "wait_late:0"]
    with pytest.raises(ProgramError, match="nobody waits|without a wait"):
        check(program.edited(no_wait))
    # the next layer's payload before the late rows are there
    steps = [s for s in program.steps if s.id != "ring:1"]
    early = replace(program.steps[program.index("ring:1")], rings=False, reads=())
    at = next(i for i, s in enumerate(steps) if s.id == "host:0")
    with pytest.raises(ProgramError, match="ring:1: overwrites .*payload.* while host:0"):
        check(program.edited([*steps[: at + 1], early, *steps[at + 1 :]]))
