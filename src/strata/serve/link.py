"""The HTTP process's end of the pipe: starts the engine process, watches it, starts it again.

Knows no HTTP. Three ways to be at fault, one answer: an engine that is gone, that gives no sign of
life, or whose pulse stands still during a request (or that does not obey a cancel) is killed, its
request ends with an error, and a new one is started, with growing pauses between attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from strata.core.log import LOG
from strata.serve.jobs import Job, Jobs
from strata.serve.messages import (
    Cancel,
    Counters,
    End,
    Failed,
    Frames,
    Load,
    Message,
    Phase,
    Ping,
    Pong,
    PromptLogprobs,
    ProtocolError,
    Reading,
    Ready,
    Stop,
    Tokens,
    encode,
)

_OF_A_JOB = (Tokens, Reading, PromptLogprobs, End)
ENGINE = (sys.executable, "-m", "strata.serve.engine_process")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
STOP_GRACE_S = 15.0
LONGEST_CANCEL_S = 30.0
KEEP_ALIVE_S = 5.0
"""A stream that has nothing to say says at least where it stands."""


@dataclass
class Health:
    """What is known about the engine. phase: "starting", "loading", "ready", "restarting",
    "failed" or "stopping"."""

    phase: str = "starting"
    detail: str = "starting"
    progress: float = 0.0
    """0 to 1; never goes back while one engine loads."""
    info: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    starts: int = 0
    faults: int = 0
    last_fault: str = ""
    ready_since: float = 0.0


class Link(asyncio.Protocol):
    """One engine process after the other, and the queue in front of it."""

    def __init__(
        self,
        load: Load,
        *,
        silence_s: float,
        max_queue: int,
        command: Sequence[str] = ENGINE,
    ) -> None:
        self.health = Health()
        self.jobs = Jobs(max_queue, self._start_job, self._cancel_job)
        self.refused: asyncio.Future[str] | None = None
        """Set when the very first load failed for a reason only the caller can mend."""
        self.last: dict[str, Any] = {}
        """Report of the last request that ended well."""
        self._load = load
        self._silence_s = silence_s
        self._obey_s = min(silence_s, LONGEST_CANCEL_S)
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._frames = Frames()
        self._pings = 0
        self._pulse = -1
        self._pulse_at = self._pong_at = 0.0
        self._keeper: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._mendable = self._noted = False

    async def start(self) -> None:
        """Start the engine, and keep one running until ``stop``."""
        self.refused = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ask the engine to end, wait for it, and end it if it does not."""
        self.health.phase = "stopping"
        self.jobs.refuse_all("the server is stopping")
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        process = self._process
        if process is None:
            return
        self.send(Stop())
        until = time.monotonic() + STOP_GRACE_S
        while process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._kill()

    def send(self, message: Message) -> None:
        """To the engine; without one, to nobody."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    # the life of an engine

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            await self._launch()
            await self._watch()
            if self.health.ready_since and time.monotonic() - self.health.ready_since > 60:
                pause = FIRST_PAUSE_S
            if self._mendable and self.health.starts == 1 and self.refused is not None:
                self.refused.set_result(self.health.last_fault)
                return
            self.health.phase = "failed" if self._mendable else "restarting"
            self.health.detail = f"again in {pause:g} s after: {self.health.last_fault}"
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._gone.clear()
        self._frames = Frames()
        self._pulse, self._mendable, self._noted = -1, False, False
        self._pulse_at = self._pong_at = time.monotonic()
        health = self.health
        health.starts += 1
        health.progress, health.ready_since, health.info = 0.0, 0.0, {}
        health.phase = "starting" if health.starts == 1 else "restarting"
        health.detail = "starting the engine process"
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=ours)
        self.send(self._load)

    async def _watch(self) -> None:
        """Until the engine is gone, by itself or because it was at fault."""
        every = min(1.0, self._silence_s / 4)
        nudged = time.monotonic()
        while not self._gone.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self._gone.wait()
                    break
            self._pings += 1
            self.send(Ping(self._pings))
            if time.monotonic() - nudged >= KEEP_ALIVE_S:
                nudged = time.monotonic()
                self.jobs.nudge()
            fault = self._fault()
            if fault:
                self._note(fault)
                self._kill()
                break
        process = self._process
        assert process is not None
        if not self._noted:
            await self._reap(process)
            code = process.returncode
            how = f"was killed by signal {-code}" if code and code < 0 else f"ended with {code}"
            self._note(f"the engine process {how}")
        self._kill()
        self.jobs.close(f"{self.health.last_fault}; it is being restarted, ask again")

    def _fault(self) -> str:
        """What is wrong with the engine right now, or nothing."""
        now, job = time.monotonic(), self.jobs.running
        # loading copies gigabytes in single steps: there only the process itself must answer
        patience = self._silence_s if self.health.ready_since else 10 * self._silence_s
        if now - self._pong_at > patience:
            return f"the engine gave no sign of life for {patience:g} s"
        if job is None:
            return ""
        since = max(self._pulse_at, job.started or now)
        if now - since > self._silence_s:
            return f"the engine made no progress for {self._silence_s:g} s"
        if job.cancelled is not None and now - job.cancelled > self._obey_s:
            return f"the engine did not obey a cancel for {self._obey_s:g} s"
        return ""

    def _note(self, fault: str) -> None:
        self._noted = True
        self.health.last_fault = fault
        self.health.faults += 1
        self.health.phase, self.health.progress = "restarting", 0.0
        LOG.error("%s", fault)

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + 2.0
        while process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.005)

    def _kill(self) -> None:
        process, transport = self._process, self._transport
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.wait()
        if transport is not None:
            transport.close()
        self._transport = None

    # jobs

    def _start_job(self, job: Job) -> None:
        self._pulse_at = time.monotonic()
        self.send(job.request)

    def _cancel_job(self, job: Job) -> None:
        self.send(Cancel(job.request.id))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pipe is there."""
        # uvloop's transports are none of asyncio's classes
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the engine."""
        try:
            for message in self._frames.feed(data):
                self._receive(message)
        except ProtocolError as error:
            self._note(str(error))
            self._gone.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The engine process is gone."""
        self._gone.set()

    def _receive(self, message: Message) -> None:
        if isinstance(message, _OF_A_JOB):
            self._pulse_at = time.monotonic()
            job = self.jobs.event(message)
            if job is not None and isinstance(message, End):
                self.last = message.report or self.last
        elif isinstance(message, Pong):
            self._pong_at = time.monotonic()
            if message.pulse != self._pulse:
                self._pulse, self._pulse_at = message.pulse, self._pong_at
        elif isinstance(message, Counters):
            self.health.counters = message.values
        elif isinstance(message, Phase):
            self._loading(message)
        elif isinstance(message, Ready):
            health = self.health
            health.info, health.progress = message.info, 1.0
            health.phase, health.detail, health.ready_since = "ready", "ready", time.monotonic()
            health.last_fault = ""
            self._pulse_at = self._pong_at = time.monotonic()
            self.jobs.open()
        elif isinstance(message, Failed):
            self._mendable = message.mendable
            self._note(message.message)

    def _loading(self, phase: Phase) -> None:
        """Progress over all phases: each has its share, the experts nearly all."""
        shares = {"opening": (0.02, 0.05), "warming up": (0.95, 0.99)}
        low, high = shares.get(phase.phase, (0.05, 0.95))
        share = phase.done / phase.total if phase.total else 0.0
        health = self.health
        health.progress = max(health.progress, low + (high - low) * min(1.0, share))
        if health.phase != "ready":
            health.phase = "loading" if health.starts == 1 else "restarting"
            health.detail = f"{phase.phase}: {phase.done} of {phase.total}"
