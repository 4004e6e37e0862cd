"""Puts a server together and runs it: settings in, exit code out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

try:
    import uvloop
except ImportError:  # half as fast without
    uvloop = None  # type: ignore[assignment]

from strata.core.errors import InputError
from strata.core.log import LOG
from strata.core.setting_kinds import SettingInfo
from strata.core.settings import SETTINGS
from strata.core.settings_load import AUTO, DEFAULT, Effective
from strata.serve.app import make_app
from strata.serve.early import EarlyPort, listen
from strata.serve.link import ENGINE, Link
from strata.serve.messages import Load
from strata.serve.metrics import Metrics
from strata.serve.model_text import ModelText, read_model_text, served_name
from strata.serve.server import Server
from strata.serve.status import facts


def make_server(
    model: str,
    asked: Effective,
    *,
    command: tuple[str, ...] = ENGINE,
    text: ModelText | None = None,
) -> Server:
    """A server, not started. command, text: another engine and its words (tests)."""
    settings = asked.settings
    name = settings.served_name or served_name(model)
    load = Load(model, *_asked(asked))
    link = Link(load, silence_s=settings.silence_s, max_queue=settings.max_queue, command=command)
    metrics = Metrics(name, lambda: facts(link))
    server = Server(
        asked,
        link,
        metrics,
        ModelText(name, why_not=""),
        (lambda: text) if text else (lambda: read_model_text(model, name)),
    )
    link.jobs.on_end = server.ended
    return server


def serve(model: str, asked: Effective, port: EarlyPort) -> int:
    """Serve on a port, until stopped, what ``early.require_servable`` has let through; the exit
    code. InputError for what turns out later."""
    quiet = asked.settings.wire_log == "none"
    LOG.setLevel(logging.WARNING if quiet else logging.INFO)
    return run_until_stopped(make_server(model, asked), port)


def run_until_stopped(server: Server, port: EarlyPort | None = None) -> int:
    """``run_server`` on the fastest event loop that is installed."""
    factory = uvloop.new_event_loop if uvloop is not None else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run_server(server, port))


async def run_server(server: Server, port: EarlyPort | None = None) -> int:
    """Listen, if nobody does yet, and serve until a signal; the exit code."""
    settings = server.settings
    config = uvicorn.Config(
        make_app(server),
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        timeout_keep_alive=75,
        limit_concurrency=None,
    )
    http = _Http(config)
    # what is there by now stays: the collector need not look at it again
    gc.freeze()
    listener = port.hand_over() if port else listen(settings.host, settings.port)
    host, number = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"strata: http://{shown}:{number} answers; loading {server.text.name}", file=sys.stderr)
    running = asyncio.create_task(http.serve(sockets=[listener]))
    watcher = asyncio.create_task(_watch(server, http))
    await running
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    refused = server.link.refused
    if refused is not None and refused.done() and not refused.cancelled():
        raise InputError(refused.result())
    return 0


class _Http(uvicorn.Server):
    """Ends with its exit code, not by sending itself the signal again, and wakes once a second, not
    ten times: each time costs as much as writing a token."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Drain and end."""
        self.should_exit = True
        self._stopping.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        super().handle_exit(sig, frame)
        self._stopping.set()

    async def main_loop(self) -> None:
        """Until told to stop."""
        tick = 0
        while not await self.on_tick(tick):
            tick += 10  # counted in tenths of a second
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A first signal drains, a second one does not wait."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def _watch(server: Server, http: _Http) -> None:
    """Print the start-up report once; stop when the model can never be loaded."""
    link = server.link
    while link.health.phase != "ready":
        if link.refused is not None and link.refused.done():
            http.stop()
            return
        await asyncio.sleep(0.05)
    for line in link.health.info.get("report", []):
        print(line, file=sys.stderr)
    print("strata: ready", file=sys.stderr, flush=True)


def _asked(asked: Effective) -> tuple[dict[str, Any], dict[str, str]]:
    """Values that somebody gave, as JSON, and where they came from."""
    names = [n for n in SETTINGS if asked.sources[n] not in (DEFAULT, AUTO)]
    names = [n for n in names if SETTINGS[n].scope != "serve"]
    values = {name: _plain(SETTINGS[name], getattr(asked.settings, name)) for name in names}
    return values, {name: asked.sources[name] for name in names}


def _plain(info: SettingInfo, value: Any) -> Any:
    if isinstance(value, Path | Fraction):
        return str(value)
    if isinstance(value, tuple):
        return [list(item) if isinstance(item, tuple) else item for item in value]
    return value
