"""A scripted server behind the real page: its answers go by the words of the last message."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from strata.serve.web import load_page

EVIL = (
    '<img src=x onerror="document.title=1"><script>document.title=2</script> '
    "[x](javascript:alert(1))"
)
MARKDOWN = (
    "# Title\n\nSome **bold** and *soft* and `code`.\n\n- one\n- two\n  - deep\n\n"
    "1. first\n2. second\n\n> quoted\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\n"
    "```python\nprint('<b>')\n```\n\nSee https://example.org/x."
)
LAYERS = 24


@dataclass
class Script:
    """What the server was asked, and how it answers."""

    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    generated: int = 0
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client left a stream that had not ended."""
    quality: dict[str, Any] = field(default_factory=dict)

    def status(self) -> dict[str, Any]:
        """A status as /v1/status gives it."""
        rows = {
            "FAST": [40 - n for n in range(LAYERS)],
            "CPU": [10 + n for n in range(LAYERS)],
            "CPU_LATE": [n // 2 for n in range(LAYERS)],
        }
        gib = 1 << 30
        self.generated += 37
        return {
            "ready": True, "phase": "ready", "progress": 1.0, "detail": "", "last_fault": None,
            "model": {"id": "tiny-flash", "context_tokens": 4096},
            "mode": {"name": "exact", "exact": True, "changes_output": []},
            "queue": {"running": {"id": 1, "generated": self.generated}, "waiting": [{"id": 2}]},
            "rows": rows,
            "timeline_ms": [[n, n * 1.4 + (n * n % 7) * 0.11] for n in range(LAYERS)],
            "plan": {
                "lines": [
                    {"tier": "vram", "owner": "mixers", "bytes": 7 * gib},
                    {"tier": "vram", "owner": "expert cache", "bytes": 11 * gib},
                    {"tier": "vram", "owner": "kv", "bytes": 2 * gib},
                    {"tier": "ram", "owner": "experts", "bytes": 61 * gib},
                ],
                "limits": {"vram": {"bytes": 24 * gib}, "ram": {"bytes": 96 * gib}},
            },
            "shares": {"hit_share": 0.712, "late_share": 0.09},
            "conversations": {"live_tokens": 812},
            "features": [{"name": "spec", "value": "4", "state": "on"}],
            "quality": self.quality,
            "settings": {"quality_budget": {"value": "0.02" if self.quality else "none"}},
            "last": {"decode_s": 2.0, "drafts": {"emitted": 60, "from_prompt": 1, "offered": 40,
                                                 "accepted": 25}},
        }  # fmt: skip

    def pieces(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Deltas of an answer."""
        words = body["messages"][-1]["content"]
        if "think" in words:
            yield {"reasoning_content": "First I count "}
            yield {"reasoning_content": "the sheep."}
        if "slow" in words:
            for n in range(600):
                time.sleep(0.02)
                yield {"content": f"{n} "}
        elif "evil" in words:
            yield {"content": EVIL}
        elif "markdown" in words:
            for at in range(0, len(MARKDOWN), 7):
                yield {"content": MARKDOWN[at : at + 7]}
        else:
            yield {"content": f"You said: {words} "}
            yield {"content": f"({len(self.asked)})"}


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    page = load_page()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _json(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _let_in(self) -> bool:
            if script.key and self.headers.get("authorization") != f"Bearer {script.key}":
                self._json(401, {"error": {"message": "this server asks for a key"}})
                return False
            return True

        def do_GET(self) -> None:
            asset = page.get(self.path)
            if asset is not None:
                self.send_response(200)
                for name, value in asset.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(asset.body)
            elif self.path == "/v1/status" and self._let_in():
                self._json(200, script.status())
            elif self.path != "/v1/status":
                self._json(404, {"error": {"message": "nothing here"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self._let_in():
                return
            script.asked.append(body)
            if "refuse" in body["messages"][-1]["content"]:
                self._json(400, {"error": {"message": "the prompt has 9 tokens too many"}})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            try:
                self._stream(body)
            except OSError:
                script.left.set()

        def _stream(self, body: dict[str, Any]) -> None:
            count = 0
            for delta in script.pieces(body):
                count += 1
                self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 9, "completion_tokens": count,
                     "prompt_tokens_details": {"cached_tokens": 4}}  # fmt: skip
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, data: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    return Handler


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a running site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(script))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
