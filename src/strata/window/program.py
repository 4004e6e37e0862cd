"""A window as a printable list of steps, and the proof that its order is right.

A Program is built once per window size (``window/layer.py``), transformed by features (functions
Program -> Program),
checked here without running anything, then run eagerly or recorded. Each stream runs in list order.

Host work stands in the list as a pseudo-step ``host:l`` right after the ring of layer l: from there
until the last wait
for layer l somebody else reads the payload and writes the CPU rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from strata.core.errors import ProgramError

Word = Literal["rows", "rows_late"]
Stream = Literal["main", "side", "host"]

HOST_BUFFERS: dict[str, Word] = {"cpu_rows": "rows", "cpu_rows_late": "rows_late"}
"""Buffers that the host writes while the device runs on, with the word that says when they may be
read."""


@dataclass(frozen=True)
class Read:
    """A buffer and the step whose write the reader must see ("name:layer"); None: what was there
    before the window."""

    buffer: str
    writer: str | None


@dataclass(frozen=True)
class Wait:
    """Hold the stream until the host has raised ``word`` for ``layer``."""

    word: Word
    layer: int


def nothing() -> None:
    """Launch of a step that somebody else carries out."""


@dataclass(frozen=True)
class Step:
    """One node of the window. ``launch`` has everything bound; running it is its whole effect."""

    name: str
    layer: int
    reads: tuple[Read, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[Wait, ...] = ()
    rings: bool = False
    stream: Stream = "main"
    launch: Callable[[], None] = nothing

    @property
    def id(self) -> str:
        """Unique within a program."""
        return f"{self.name}:{self.layer}"

    def line(self) -> str:
        """One line for people."""
        text = f"{self.id:<22}"
        if self.waits:
            text += " waits " + ", ".join(f"{w.word}({w.layer})" for w in self.waits)
        if self.rings:
            text += " rings"
        if self.reads:
            text += "  <- " + ", ".join(
                r.buffer + (f"[{r.writer}]" if r.writer else "[before]") for r in self.reads
            )
        if self.writes:
            text += "  -> " + ", ".join(self.writes)
        return text + ("" if self.stream == "main" else f"   ({self.stream})")


@dataclass(frozen=True)
class Program:
    """Steps of one window of n_tokens tokens. ``kept`` buffers outlive the window (state, commit
    inputs, logits)."""

    n_tokens: int
    n_layers: int
    steps: tuple[Step, ...]
    kept: frozenset[str] = frozenset()

    def index(self, step_id: str) -> int:
        """Position of a step (ProgramError when absent)."""
        for i, step in enumerate(self.steps):
            if step.id == step_id:
                return i
        raise ProgramError(f"the program has no step {step_id}")

    def has(self, step_id: str) -> bool:
        """Whether a step of that id exists."""
        return any(step.id == step_id for step in self.steps)

    def edited(self, steps: Iterable[Step]) -> Program:
        """The same window with other steps."""
        return replace(self, steps=tuple(steps))

    def lines(self) -> list[str]:
        """The printed form, one line a step."""
        return [step.line() for step in self.steps]


def check(program: Program) -> None:
    """Prove the order of a program, and of the program run twice in a row; raises ProgramError
    naming step and rule."""
    steps = program.steps
    _check_ids(steps)
    _check_reads(steps + steps, len(steps))
    for i, step in enumerate(steps):
        if step.rings:
            _check_ring(steps, i)
        for wait in step.waits:
            _check_wait(steps, i, wait)
        for read in step.reads:
            if read.buffer in HOST_BUFFERS and step.stream != "host":
                _check_host_read(steps, i, read)
        if step.name == "late_join":
            _check_late_join(program, i)


def _fail(step: Step, rule: str) -> ProgramError:
    return ProgramError(f"step {step.id}: {rule}")


def _check_ids(steps: tuple[Step, ...]) -> None:
    seen: set[str] = set()
    for step in steps:
        if step.id in seen:
            raise _fail(step, "stands in the program twice")
        seen.add(step.id)


def _check_reads(twice: tuple[Step, ...], n: int) -> None:
    """Every read finds the write it names as the last one; in the second round too."""
    last: dict[str, tuple[int, str]] = {}
    for i, step in enumerate(twice):
        round_ = i // n
        for read in step.reads:
            at, writer = last.get(read.buffer, (-1, ""))
            fresh = writer if at == round_ else None
            if fresh != read.writer:
                raise _fail(
                    step,
                    f"reads {read.buffer} as written by {read.writer or 'nobody in this window'}, "
                    f"but the last write is by {fresh or 'nobody in this window'}",
                )
        for buffer in step.writes:
            last[buffer] = (round_, step.id)


def _check_ring(steps: tuple[Step, ...], i: int) -> None:
    ring = steps[i]
    if i + 1 >= len(steps) or steps[i + 1].id != f"host:{ring.layer}":
        raise _fail(ring, f"must be followed directly by host:{ring.layer}, which it starts")
    host = steps[i + 1]
    wrote = {r.writer for r in ring.reads if r.buffer == "payload"}
    own = {f"{name}:{ring.layer}" for name in ("publish", "plan")}
    if "payload" not in ring.writes and not wrote & own:
        raise _fail(ring, "rings without reading the payload of its layer, and writes none")
    waited = [j for j, s in enumerate(steps) for w in s.waits if w.layer == ring.layer]
    for buffer in host.writes:
        word = HOST_BUFFERS.get(buffer)
        ends = [
            j
            for j, s in enumerate(steps)
            for w in s.waits
            if w.layer == ring.layer and w.word == word
        ]
        if not ends:
            raise _fail(ring, f"nobody waits for {word} of layer {ring.layer}")
    open_until = max(waited)
    held = {r.buffer for r in host.reads} | set(host.writes)
    for step in steps[i + 2 : open_until]:
        clash = held.intersection(step.writes)
        if clash:
            raise _fail(step, f"overwrites {sorted(clash)} while host:{ring.layer} still uses it")


def _check_wait(steps: tuple[Step, ...], i: int, wait: Wait) -> None:
    before = steps[:i]
    if not any(s.rings and s.layer == wait.layer for s in before):
        raise _fail(
            steps[i], f"waits for layer {wait.layer} before its ring: it would never return"
        )
    host = next((s for s in before if s.id == f"host:{wait.layer}"), None)
    if host is None or not any(HOST_BUFFERS.get(b) == wait.word for b in host.writes):
        raise _fail(steps[i], f"waits for {wait.word} of layer {wait.layer}, which nobody raises")


def _check_host_read(steps: tuple[Step, ...], i: int, read: Read) -> None:
    step = steps[i]
    if read.writer is None or not read.writer.startswith("host:"):
        raise _fail(step, f"reads {read.buffer} without naming the host step that writes it")
    layer = int(read.writer.split(":")[1])
    need = Wait(HOST_BUFFERS[read.buffer], layer)
    if not any(need in s.waits for s in steps[: i + 1]):
        raise _fail(step, f"reads {read.buffer} of layer {layer} without a wait for it")


def _check_late_join(program: Program, i: int) -> None:
    steps, layer = program.steps, program.steps[i].layer
    join, nxt = steps[i], steps[i].layer + 1
    if nxt >= program.n_layers:
        raise _fail(join, "the last layer cannot be late: the head reads its residual")
    if program.has(f"ngram:{nxt}"):
        raise _fail(join, f"layer {nxt} begins with an n-gram block, which reads the full residual")
    for name in ("ffn_read", "plan"):
        if program.has(f"{name}:{nxt}") and program.index(f"{name}:{nxt}") < i:
            raise _fail(join, f"stands behind {name}:{nxt}, which must see layer {layer}'s rows")
    if program.index(f"combine:{layer}") > i:
        raise _fail(join, f"stands before combine:{layer}")
