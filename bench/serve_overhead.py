"""What the HTTP layer costs: CPU time of its process per streamed token, and time to the first one.

python bench/serve_overhead.py [--tokens 2000] [--requests 10]

The engine process is the scripted one, so that nothing but the server is measured. CPU time is the
kernel's account of the HTTP process (user and system), the pipe included. The first token's time is
the client's, less what the engine process itself needed for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from strata.core.settings_load import load_settings
from strata.serve.main import make_server, run_until_stopped
from strata.serve.model_text import ModelText
from strata.serve.scripted_text import ScriptedTokenizer


def script_of(n_tokens: int) -> dict[str, object]:
    """One answer of n tokens at 2 ms each (a fast model), and one of a single token."""
    words = [f"word{i % 50} " for i in range(n_tokens)]
    return {
        "context": 1 << 20,
        "answers": [
            {"when": "long", "write": words, "delay_s": 0.002},
            {"when": "short", "write": ["word1 "]},
        ],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--child", metavar="SCRIPT")
    args = parser.parse_args()
    if args.child:
        serve(Path(args.child))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        path.write_text(json.dumps(script_of(args.tokens)), encoding="utf-8")
        asyncio.run(measure(path, args.tokens, args.requests))


def serve(path: Path) -> None:
    """The server to measure, in a process of its own."""
    script = json.loads(path.read_text(encoding="utf-8"))
    text = ModelText("scripted", "qwen3_moe", ScriptedTokenizer(script))
    asked = load_settings({"port": 8311, "wire_log": "none"}, environ={})
    command = (sys.executable, "-m", "strata.serve.scripted", str(path))
    run_until_stopped(make_server("scripted", asked, command=command, text=text))


async def measure(path: Path, n_tokens: int, n_requests: int) -> None:
    """Ask, count, print."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--child", str(path), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8311", timeout=60) as client:
            await ready(client)
            process = psutil.Process(child.pid)
            await stream(client, "long", process)
            costs = [await stream(client, "long", process) for _ in range(n_requests)]
            with socket.create_connection(("127.0.0.1", 8311)) as sock:
                firsts = [await asyncio.to_thread(first, sock) for _ in range(200)]
    finally:
        child.terminate()
        await child.wait()
    for user, system in costs:
        print(
            f"CPU time of the HTTP process a streamed token: {user * 1e6 / n_tokens:.1f} us user, "
            f"{system * 1e6 / n_tokens:.1f} us system"
        )
    ms = sorted(x * 1e3 for x in firsts)
    print(
        f"first token: HTTP layer adds {statistics.median(ms):.2f} ms (median of {len(ms)}), "
        f"p95 {ms[int(0.95 * len(ms))]:.2f} ms"
    )


async def ready(client: httpx.AsyncClient) -> None:
    """Wait for the scripted engine."""
    for _ in range(200):
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server did not become ready")


async def stream(
    client: httpx.AsyncClient, what: str, process: psutil.Process
) -> tuple[float, float]:
    """CPU seconds (user, system) of the server while it streams one answer."""
    before = process.cpu_times()
    async with client.stream("POST", "/v1/chat/completions", json=body(what)) as response:
        async for _ in response.aiter_raw():
            pass
    after = process.cpu_times()
    return after.user - before.user, after.system - before.system


def first(sock: socket.socket) -> float:
    """Seconds to the first token that are not the engine's, on a connection that is open."""
    raw = json.dumps(body("short")).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    at, data, start = 0.0, b"", time.perf_counter()
    sock.sendall(request.encode() + raw)
    while not data.endswith(b"0\r\n\r\n"):
        data += sock.recv(65536)
        if not at and b"word1" in data:
            at = time.perf_counter() - start
    report = next(x for x in data.split(b"\n\n") if b'"strata"' in x)
    engine_s = float(report.split(b'"engine_first_s": ')[1].split(b",")[0])
    return at - engine_s


def body(what: str) -> dict[str, object]:
    """A streamed request."""
    return {"messages": [{"role": "user", "content": what}], "stream": True}


if __name__ == "__main__":
    main()
