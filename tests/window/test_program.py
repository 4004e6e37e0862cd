"""check() against programs edited by hand: each edit is a fault that must be named, and the plain
form must pass.

Expectations come from the rules in docs/ARCHITECTURE.md ("the window"); no numbers are computed
here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.errors import ProgramError
from strata.window.program import Program, Read, Step, Wait, check

LAST = 2


def moe_layer(layer: int, before: str, late_from: int | None = None) -> list[Step]:
    """One layer's steps with hand-written reads; ``late_from``: the layer whose rows join here."""

    def at(name: str) -> str:
        return f"{name}:{layer}"

    steps = [
        Step("attn_read", layer, (Read("residual", before),), ("x",)),
        Step(
            "mixer",
            layer,
            (Read("x", at("attn_read")), Read(f"kv:{layer}", None)),
            ("mixer_out", f"kv:{layer}"),
        ),
        Step(
            "attn_write",
            layer,
            (Read("residual", before), Read("mixer_out", at("mixer"))),
            ("residual",),
        ),
    ]
    residual = at("attn_write")
    if late_from is not None:
        steps += [
            Step("wait_late", late_from, waits=(Wait("rows_late", late_from),)),
            Step(
                "late_join",
                late_from,
                (Read("residual", residual), Read("cpu_rows_late", f"host:{late_from}")),
                ("residual",),
            ),
        ]
        residual = f"late_join:{late_from}"
    steps += [
        Step("ffn_read", layer, (Read("residual", residual),), ("ffn_x",)),
        Step("router", layer, (Read("ffn_x", at("ffn_read")),), ("expert", "weight")),
        Step("plan", layer, (Read("expert", at("router")),), ("plan",)),
        Step(
            "publish",
            layer,
            (Read("ffn_x", at("ffn_read")), Read("plan", at("plan"))),
            ("payload",),
        ),
        Step("ring", layer, (Read("payload", at("publish")),), rings=True),
    ]
    return steps


def after_ring(layer: int, residual: str, late: bool) -> list[Step]:
    """From the host's pseudo-step to the FFN write."""

    def at(name: str) -> str:
        return f"{name}:{layer}"

    payload = Read("payload", at("publish"))
    rows = "cpu_rows_late" if late else "cpu_rows"
    steps = [Step("host", layer, (payload,), (rows,), stream="host")]
    reads = [Read("weight", at("router"))]
    if not late:
        steps.append(Step("wait_cpu", layer, waits=(Wait("rows", layer),)))
        reads.append(Read("cpu_rows", at("host")))
    steps += [
        Step("combine", layer, tuple(reads), ("ffn_out",)),
        Step(
            "ffn_write",
            layer,
            (Read("residual", residual), Read("ffn_out", at("combine"))),
            ("residual",),
        ),
    ]
    return steps


def make(late: tuple[int, ...] = ()) -> Program:
    """Three layers; the layers in ``late`` are joined one mixer later."""
    steps = [Step("embed", 0, (), ("residual",))]
    before = "embed:0"
    for layer in range(LAST + 1):
        joins = layer - 1 if layer - 1 in late else None
        steps += moe_layer(layer, before, joins)
        residual = f"attn_write:{layer}" if joins is None else f"late_join:{joins}"
        steps += after_ring(layer, residual, layer in late)
        before = f"ffn_write:{layer}"
    steps.append(Step("head", LAST + 1, (Read("residual", before),), ("logits",)))
    return Program(2, LAST + 1, tuple(steps), frozenset({"logits"}))


def without(program: Program, step_id: str) -> Program:
    return program.edited(s for s in program.steps if s.id != step_id)


def moved(program: Program, step_id: str, behind: str) -> Program:
    """The step moved to right behind another."""
    step = program.steps[program.index(step_id)]
    rest = [s for s in program.steps if s.id != step_id]
    at = next(i for i, s in enumerate(rest) if s.id == behind) + 1
    return program.edited([*rest[:at], step, *rest[at:]])


def changed(program: Program, step_id: str, **fields: object) -> Program:
    return program.edited(
        replace(s, **fields) if s.id == step_id else s  # type: ignore[arg-type]
        for s in program.steps
    )


@pytest.mark.parametrize("late", [(), (0,), (0, 1)])
def test_right_programs_pass(late: tuple[int, ...]) -> None:
    check(make(late))


def test_dropped_wait() -> None:
    with pytest.raises(
        ProgramError, match=r"combine:1: reads cpu_rows of layer 1 without a wait|nobody waits"
    ):
        check(without(make(), "wait_cpu:1"))


def test_dropped_late_wait() -> None:
    with pytest.raises(ProgramError, match="nobody waits for rows_late of layer 1"):
        check(without(make((1,)), "wait_late:1"))


def test_wait_moved_behind_the_read() -> None:
    with pytest.raises(ProgramError, match="combine:1: reads cpu_rows of layer 1 without a wait"):
        check(moved(make(), "wait_cpu:1", "combine:1"))


def test_late_wait_moved_behind_the_join() -> None:
    with pytest.raises(
        ProgramError, match="late_join:0: reads cpu_rows_late of layer 0 without a wait"
    ):
        check(moved(make((0,)), "wait_late:0", "late_join:0"))


def test_late_join_behind_the_ffn_read() -> None:
    with pytest.raises(ProgramError, match="ffn_read:1"):
        check(moved(make((0,)), "late_join:0", "ffn_read:1"))


def test_late_join_behind_the_ffn_read_with_forged_reads() -> None:
    """Even if the FFN read is edited to accept the older residual, the join's own rule names the
    fault."""
    program = moved(make((0,)), "late_join:0", "ffn_read:1")
    forged = changed(program, "ffn_read:1", reads=(Read("residual", "attn_write:1"),))
    with pytest.raises(ProgramError, match="stands behind ffn_read:1"):
        check(forged)


def test_late_join_behind_the_next_plan() -> None:
    program = moved(make((0,)), "late_join:0", "plan:1")
    forged = changed(program, "ffn_read:1", reads=(Read("residual", "attn_write:1"),))
    with pytest.raises(ProgramError, match="stands behind (ffn_read|plan):1"):
        check(forged)


def test_late_join_dropped() -> None:
    with pytest.raises(ProgramError, match="ffn_read:1"):
        check(without(make((0,)), "late_join:0"))


def test_late_last_layer() -> None:
    program = make()
    late = [
        *after_ring(LAST, f"attn_write:{LAST}", late=True),
        Step("wait_late", LAST, waits=(Wait("rows_late", LAST),)),
        Step(
            "late_join",
            LAST,
            (Read("residual", f"ffn_write:{LAST}"), Read("cpu_rows_late", f"host:{LAST}")),
            ("residual",),
        ),
        Step("head", LAST + 1, (Read("residual", f"late_join:{LAST}"),), ("logits",)),
    ]
    head = program.steps[: program.index(f"host:{LAST}")]
    with pytest.raises(ProgramError, match="last layer cannot be late"):
        check(program.edited([*head, *late]))


def test_late_layer_before_an_ngram_block() -> None:
    program = make((0,))
    at = program.index("attn_read:1")
    ngram = Step("ngram", 1, (Read("residual", "ffn_write:0"),), ("residual",))
    steps = [*program.steps[:at], ngram, *program.steps[at:]]
    forged = [
        replace(
            s,
            reads=tuple(
                Read(r.buffer, "ngram:1") if r.writer == "ffn_write:0" else r for r in s.reads
            ),
        )
        if s.id in ("attn_read:1", "attn_write:1")
        else s
        for s in steps
    ]
    with pytest.raises(ProgramError, match="begins with an n-gram block"):
        check(program.edited(forged))


def test_buffer_overwritten_early() -> None:
    """A step that writes x between its write and its reader."""
    program = make()
    at = program.index("mixer:1")
    rogue = Step("rogue", 1, (), ("x",))
    with pytest.raises(ProgramError, match="mixer:1: reads x as written by attn_read:1"):
        check(program.edited([*program.steps[:at], rogue, *program.steps[at:]]))


def test_payload_overwritten_while_the_host_reads_it() -> None:
    program = make((0,))
    at = program.index("attn_read:1")
    rogue = Step("rogue", 1, (), ("payload",))
    with pytest.raises(ProgramError, match="rogue:1: overwrites .*payload.* while host:0"):
        check(program.edited([*program.steps[:at], rogue, *program.steps[at:]]))


def test_ring_without_its_payload() -> None:
    with pytest.raises(ProgramError, match="ring:1|host:1"):
        check(without(make(), "publish:1"))
    with pytest.raises(ProgramError, match="rings without reading the payload"):
        check(changed(make(), "ring:1", reads=()))


def test_wait_before_its_ring() -> None:
    program = make()
    with pytest.raises(ProgramError, match="before its ring"):
        check(moved(program, "wait_cpu:1", "ffn_read:1"))


def test_ring_without_host_step() -> None:
    with pytest.raises(ProgramError, match="must be followed directly by host:1"):
        check(moved(make(), "host:1", "wait_cpu:1"))


def test_a_step_twice() -> None:
    program = make()
    with pytest.raises(ProgramError, match="twice"):
        check(program.edited([*program.steps, program.steps[-1]]))


def test_second_window_sees_no_leftovers() -> None:
    """A read of "what was there before" that this window itself writes later is right in round one
    and wrong if a
    step before it in the same window wrote it."""
    program = make()
    at = program.index("attn_read:2")
    rogue = Step("rogue", 2, (), ("kv:2",))
    with pytest.raises(ProgramError, match="mixer:2: reads kv:2"):
        check(program.edited([*program.steps[:at], rogue, *program.steps[at:]]))
