"""Runs windows on a device: stages tokens, replays the graph, answers rings, hands out logits.

Has no idea which features are on. The invariant is that of ``window/run.py``: between ``run`` and
``commit`` the state that later windows see is unchanged. Without a GPU the kernels run in Triton's
interpreter, step by step, and the host answers inside the ring.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from strata.core.settings import Settings
from strata.core.types import Place
from strata.experts.device_service import DeviceService
from strata.experts.link_part import missed_experts
from strata.experts.share_control import SOUGHT, ShareControl
from strata.kernels.words import triton_memop as memop
from strata.kernels.words.triton import ring, wait
from strata.memory.handshake import DEVICE_LIMIT_NS, ERROR, RING, ROWS, ROWS_LATE
from strata.models.gpu.frame import DeviceState, GpuFrame
from strata.models.gpu.gdn import GpuGdn
from strata.models.gpu.network import GpuNetwork
from strata.window.choice import Choice
from strata.window.device_chunk import PromptReader
from strata.window.device_layer import DeviceProgram, Meeting, device_program
from strata.window.device_record import Launch, graph, side_by_side, stream_trouble
from strata.window.device_staged import Staged
from strata.window.fuse import fuse
from strata.window.program import Program, check
from strata.window.record import eager
from strata.window.run import MAX_WINDOW_TOKENS

DeviceTransform = Callable[[DeviceProgram, GpuFrame, Meeting], DeviceProgram]


@dataclass(frozen=True)
class DeviceVariant:
    """One way to run windows: what features change in the steps and in the plan's scalars.

    Prompts always run the plain variant.
    """

    name: str = "exact"
    transforms: tuple[DeviceTransform, ...] = ()
    below_L: tuple[float, ...] | None = None
    """Of ``DeviceService.defer_below``; None: no row is late."""
    late_L: tuple[bool, ...] = ()
    """Layers whose rows are late by the threshold of the window's size instead of ``below_L``."""
    share_rests: bool = False
    """The PCIe share stays at its first value: what the link takes is not late, so a share found
    while windows run would change the output."""
    share: int | None = None
    """PCIe share in 256ths, SOUGHT (while windows run), or None: as the engine's settings say."""
    tail_rank: int = 0
    """A missed expert held at this rank or behind by every token is skipped; 0: none."""
    last: tuple[Callable[[Program, GpuFrame], Program], ...] = ()
    """Changes of the steps as they run, fused, with or without the host: measurements."""
    rings_apart: bool = False
    """Rings are steps of their own, to be timed or left out, instead of the plan's last act."""


PLAIN = DeviceVariant()


@dataclass(frozen=True)
class DeviceWindow:
    """A window size ready to run. finish: writes the recurrent state after frame.n_accepted tokens,
    0 < n < T; None where there is none. That after all T is written by the window itself."""

    variant: DeviceVariant
    frame: GpuFrame
    program: Program
    staged: Staged
    run: Launch
    finish: Launch | None
    host: bool


@dataclass(frozen=True)
class Chunk:
    """A piece of a prompt, read through windows; the last n_head logits are wanted."""

    n_tokens: int
    n_head: int


class DeviceRunner:
    """All window sizes of one engine over one sequence state."""

    def __init__(
        self,
        network: GpuNetwork,
        service: DeviceService,
        state: DeviceState,
        variant: DeviceVariant | None = None,
        share: ShareControl | None = None,
        reader: PromptReader | None = None,
        short_read: int = 0,
        stream_waits: bool = False,
    ) -> None:
        """stream_waits: by memory operations of the stream, not by a program that polls."""
        self.network, self.service, self.state = network, service, state
        self.variant = variant or PLAIN
        self.overlaps = {"exact": PLAIN}
        """What a request may choose instead of ``variant``."""
        self.variant_for: Callable[[Settings], DeviceVariant] | None = None
        """Makes a variant of other settings of windows, for comparisons."""
        self.use_workers: Callable[[int], None] | None = None
        """Lets another number of workers answer rings, for comparisons."""
        self.share = share
        self._reader, self._short_read = reader, short_read
        self._stream_waits = stream_waits
        self._rules: tuple[object, int] = (None, 0)
        self._compiled = network.device.type == "cuda"
        self._windows: dict[tuple[str, int, bool], DeviceWindow] = {}
        self._pending: DeviceWindow | None = None
        self._chunk: int | None = None
        """Tokens of the chunk just run, which are committed already."""
        self.choice: Choice | None = None
        """Of the window just run."""
        self._on_host: torch.Tensor | None = None
        self._idle = False
        """Nothing on the stream touches the handshake's words: the last window ended well."""

    def window(self, n_tokens: int) -> DeviceWindow:
        """The program for windows of n_tokens (1..8), made at first use and kept."""
        if not 1 <= n_tokens <= MAX_WINDOW_TOKENS:
            raise ValueError(f"a window has 1..{MAX_WINDOW_TOKENS} tokens, not {n_tokens}")
        return self._window(n_tokens, self.variant)

    def _window(self, n_tokens: int, variant: DeviceVariant) -> DeviceWindow:
        host = self.network.n_active > 0 and not self.service.all_resident()
        key = (variant.name, n_tokens, host)
        if key not in self._windows:
            self._windows[key] = self._record(n_tokens, variant, host)
        return self._windows[key]

    def chunk(self, n_tokens: int, n_head: int) -> Chunk:
        """A piece of a prompt."""
        return Chunk(n_tokens, n_head)

    def run(self, recorded: DeviceWindow | Chunk, tokens: Sequence[int]) -> torch.Tensor:
        """Logits f32: of a chunk [n_head, V] on the host, and its state is advanced; of a window
        [T, V] where they were made (see ``on_host``), until the next run, and it is not yet.

        ContextLengthError first.
        """
        self.state.require_room(len(tokens))
        if isinstance(recorded, Chunk):
            return self._run_chunk(recorded, tokens)
        self._pending = self._chunk = self.choice = None
        self._run_window(recorded, tokens)
        self._pending, self.choice = recorded, recorded.staged.choice()
        return recorded.frame["logits"]

    def on_host(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """What ``run`` gave, in main memory, valid until the next run: one copy of all rows."""
        if logits_TV.device.type == "cpu":
            return logits_TV
        if self._on_host is None:
            shape = (MAX_WINDOW_TOKENS, self.network.spec.n_vocab)
            self._on_host = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        found = self._on_host[: len(logits_TV)]
        found.copy_(logits_TV, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return found

    def commit(self, n: int) -> None:
        """Keep the first n tokens (0..T) of the window just run."""
        if self._chunk is not None:
            size, self._chunk = self._chunk, None
            if n != size:
                raise ValueError(f"commit({n}) of a chunk of {size} tokens, which is kept whole")
            return
        recorded = self._pending
        if recorded is None:
            raise ValueError("commit without a window that ran")
        if not 0 <= n <= recorded.frame.T:
            raise ValueError(f"commit({n}) of a window of {recorded.frame.T} tokens")
        self._pending = None
        if n:
            if n < recorded.frame.T and recorded.finish is not None:
                recorded.staged.accepted.fill_(n)
                recorded.finish()
            self.state.flip_all()
        self.state.tokens.extend(recorded.frame.tokens[:n])

    def _run_chunk(self, chunk: Chunk, tokens: Sequence[int]) -> torch.Tensor:
        self._pending = self.choice = None
        first_wanted = chunk.n_tokens - chunk.n_head
        rows: list[torch.Tensor] = []
        begin = 0
        if self._reader is not None and len(tokens) >= self._short_read:
            begin = len(tokens) // self._reader.piece * self._reader.piece
            n_head = max(0, begin - first_wanted)
            self._set_rules(PLAIN, MAX_WINDOW_TOKENS)
            rows += [self._reader.read(tokens[:begin], n_head)] if begin else []
        for start in range(begin, len(tokens), MAX_WINDOW_TOKENS):
            piece = tokens[start : start + MAX_WINDOW_TOKENS]
            recorded = self._window(len(piece), PLAIN)
            self._run_window(recorded, piece)
            if start + len(piece) > first_wanted:
                wanted = recorded.frame["logits"][max(0, first_wanted - start) :]
                rows.append(wanted.to("cpu", copy=True))
            self._pending, self._chunk = recorded, None
            self.commit(len(piece))
        self._chunk = chunk.n_tokens
        return torch.cat(rows) if rows else torch.empty(0, self.network.spec.n_vocab)

    def _run_window(self, recorded: DeviceWindow, tokens: Sequence[int]) -> None:
        staged, frame = recorded.staged, recorded.frame
        frame.start, frame.tokens = self.state.length, tuple(tokens)
        staged.fill(self.state.front_of_all, frame.start, self.state.tokens, frame.tokens)
        self.service.refresh()
        self._set_rules(recorded.variant, frame.T)
        seeking = self._share_out(recorded)
        began = time.perf_counter()
        self._launch(recorded)
        seconds = time.perf_counter() - began
        if seeking is not None:
            missed = partial(missed_experts, staged.expert_LR, staged.place_LR)
            seeking.after(frame.T, seconds, missed)
        if self.network.n_active:
            self.service.note(staged.expert_LR, staged.place_LR)

    def _share_out(self, recorded: DeviceWindow) -> ShareControl | None:
        """Set what of a window's missed experts the link takes; returns who learns by its time."""
        share, variant = self.share, recorded.variant
        if share is None or not recorded.host:
            return None
        sought = variant.share == SOUGHT or (variant.share is None and share.seeks)
        if sought and not variant.share_rests:
            share.before(recorded.frame.T)
            return share
        if variant.share is None or sought:
            share.rest()
        else:
            share.fix(variant.share)
        return None

    def _set_rules(self, variant: DeviceVariant, n_tokens: int) -> None:
        """The plan's scalars as the variant wants them; touched only when they change."""
        below_L = variant.below_L
        if any(variant.late_L):
            below = self.service.late_below.of(n_tokens)
            below_L = tuple(below if late else -1.0 for late in variant.late_L)
        if (below_L, variant.tail_rank) == self._rules:
            return
        self._rules = below_L, variant.tail_rank
        self.service.defer_below(below_L or (-1.0,) * self.network.spec.n_layers)
        self.service.rules.tail_rank.fill_(variant.tail_rank)

    def _launch(self, recorded: DeviceWindow) -> None:
        """The window, and every ring until the last."""
        shake, done = self.service.handshake, self.network.spec.n_layers + 1
        if not self._compiled:
            shake.start()
            recorded.run()
            return
        if not self._idle:
            torch.cuda.current_stream().synchronize()
        self._idle = False
        shake.start()
        was_on = gc.isenabled()
        gc.disable()
        try:
            recorded.run()
            if recorded.host:
                # its last ring comes from its last launch
                self.service.serve_window(recorded.frame.T, done, stream_trouble)
            else:
                torch.cuda.current_stream().synchronize()
        except BaseException:
            shake.release()
            self.service.drain()
            raise
        finally:
            if was_on:
                gc.enable()
        self._idle = True
        shake.require_no_timeout()

    def _meeting(self, n_tokens: int) -> Meeting:
        service = self.service
        made, shake = service.buffers(n_tokens), service.handshake

        def answer(layer: int) -> None:
            if int(made.any_host):  # else the payload is an earlier layer's
                service.serve(layer, n_tokens)

        if not self._compiled:
            return Meeting(answer, lambda layer, place: None)
        word = {w: shake.word_address(w) for w in (RING, ROWS, ROWS_LATE, ERROR)}

        def wait_for(layer: int, place: Place) -> None:
            late = place is Place.CPU_LATE
            count = made.late if late else made.on_time
            which = word[ROWS_LATE if late else ROWS]
            if self._stream_waits:
                memop.wait(which, layer + 1, count)
            else:
                wait(which, layer + 1, DEVICE_LIMIT_NS, word[ERROR], count)

        return Meeting(
            lambda layer: ring(word[RING], layer + 1, made.any_host), wait_for, word[RING]
        )

    def _record(self, n_tokens: int, variant: DeviceVariant, host: bool) -> DeviceWindow:
        network, service = self.network, self.service
        frame = network.new_frame(n_tokens, self.state)
        staged = self._staged(frame)
        meeting = self._meeting(n_tokens)
        built = device_program(network, frame, service, meeting, host)
        for transform in variant.transforms if host else ():
            built = transform(built, frame, meeting)
        check(built.program)
        apart = {"ring"} if variant.rings_apart else set()
        program = fuse(built.program, [f for f in built.fusions if f.name not in apart])
        for change in variant.last:
            program = change(program, frame)
        check(program)
        steps = side_by_side(program) if self._compiled else eager(program)

        recurrent = [mixer for mixer in network.mixers if isinstance(mixer, GpuGdn)]
        ring_of_end = None
        if self._compiled and host:
            ring_of_end = service.handshake.word_address(RING), network.spec.n_layers + 1

        def run() -> None:
            staged.take()
            steps()
            staged.hand(ring_of_end)

        def finish() -> None:
            frame.n_accepted.copy_(staged.accepted, non_blocking=True)
            for mixer in recurrent:
                mixer.replay(frame)

        launches: tuple[Launch, ...] = (run, finish) if recurrent else (run,)
        if self._compiled:
            launches = self._graphs(launches, staged, n_tokens)
        finished = launches[1] if recurrent else None
        return DeviceWindow(variant, frame, program, staged, launches[0], finished, host)

    def _graphs(
        self, launches: Sequence[Launch], staged: Staged, n_tokens: int
    ) -> tuple[Launch, ...]:
        """Graphs of the launches, after a rehearsal whose waits are open and whose results go
        nowhere: what it writes lies behind the committed length, or in the copy of recurrent state
        that is not the committed one."""
        state = self.state
        state.require_room(n_tokens)
        staged.fill(state.front_of_all, state.length, state.tokens, (0,) * n_tokens)
        self.service.refresh()
        self.service.handshake.start()
        self.service.handshake.release()
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        return tuple(graph(launch) for launch in launches)

    def _staged(self, frame: GpuFrame) -> Staged:
        network = self.network
        made = self.service.buffers(frame.T) if network.n_active else None
        gather = next(iter(network.ngram_rows.values()), None)
        return Staged(frame, made, gather, self._compiled)
