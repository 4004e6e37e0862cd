"""A whole server in a test: real HTTP on a real port, real processes, a scripted engine.

The server runs in a thread of the test process, its engine is a process without a model (see
``strata.serve.scripted``). Clients are plain sockets and httpx.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from strata.core.settings_load import load_settings
from strata.serve.app import make_app
from strata.serve.early import listen
from strata.serve.main import make_server
from strata.serve.model_text import ModelText
from strata.serve.scripted_text import ScriptedTokenizer
from strata.serve.server import Server

NAME = "scripted"


class _Http(uvicorn.Server):
    """No signal handlers: a test's thread may not have any."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Running:
    """A server that answers."""

    def __init__(
        self,
        folder: Path | None,
        script: dict[str, Any] | None,
        *,
        model: str = NAME,
        wait: bool = True,
        **settings: Any,
    ) -> None:
        asked = load_settings({"port": 0, "silence_s": 30.0, **settings}, environ={})
        if script is None:
            self.server = make_server(model, asked)
        else:
            assert folder is not None
            path = folder / "script.json"
            path.write_text(json.dumps(script), encoding="utf-8")
            command = (sys.executable, "-m", "strata.serve.scripted", str(path))
            text = ModelText(NAME, "qwen3_moe", ScriptedTokenizer(script))
            self.server = make_server(model, asked, command=command, text=text)
        self._listener = listen(asked.settings.host, 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = make_app(self.server)
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, lifespan="on",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._http = _Http(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        headers = {"Authorization": f"Bearer {asked.settings.api_key}"}
        self.client = httpx.Client(
            base_url=self.url, timeout=30, headers=headers if asked.settings.api_key else {}
        )
        if wait:
            self.wait_ready()

    def _run(self) -> None:
        asyncio.run(self._http.serve(sockets=[self._listener]))

    def wait_ready(self, timeout_s: float = 30) -> None:
        """Until /ready says so."""
        wait_for(lambda: self.get("/ready").status_code == 200, timeout_s)

    def get(self, path: str, **more: Any) -> httpx.Response:
        """GET."""
        return self.client.get(path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """POST JSON."""
        return self.client.post(path, json=body, **more)

    def chat(self, content: str, **more: Any) -> dict[str, Any]:
        """A chat answer at once."""
        response = self.post("/v1/chat/completions", {**messages(content), **more})
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, content: str, **more: Any) -> str:
        """Its text."""
        return self.chat(content, **more)["choices"][0]["message"]["content"]

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream; the end marker must be there."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [x for x in response.text.split("\n\n") if x.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    @property
    def status(self) -> dict[str, Any]:
        """/v1/status."""
        return self.get("/v1/status").json()

    def idle(self) -> bool:
        """Nothing runs and nobody waits."""
        queue = self.status["queue"]
        return queue["running"] is None and not queue["waiting"]

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        total = 0.0
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def stop(self) -> None:
        """End it."""
        self.client.close()
        self._http.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"


@contextmanager
def running(folder: Path | None, script: dict[str, Any] | None, **more: Any) -> Iterator[Running]:
    """A server for a block."""
    server = Running(folder, script, **more)
    try:
        yield server
    finally:
        server.stop()


def messages(content: str) -> dict[str, Any]:
    """A body with one message."""
    return {"messages": [{"role": "user", "content": content}]}


def wait_for(holds: Callable[[], bool], timeout_s: float = 5) -> float:
    """Seconds until it holds; fails when it does not in time."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < timeout_s, "waited in vain"
        time.sleep(0.03)
    return time.monotonic() - start


def content(chunks: list[dict[str, Any]], field: str = "content") -> str:
    """The joined deltas of a chat stream."""
    parts = [c["choices"][0]["delta"].get(field) or "" for c in chunks if c["choices"]]
    return "".join(parts)


__all__ = ["NAME", "Running", "Server", "content", "messages", "running", "wait_for"]
