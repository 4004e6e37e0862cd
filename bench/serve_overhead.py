"""What the HTTP layer costs: CPU time of its process per streamed token, and time to the first one.

python bench/serve_overhead.py [--tokens 2000] [--requests 3] [--ms 2 5 20]

The engine process is the scripted one, so that nothing but the server is measured. CPU time is what
the kernel's scheduler has given to all threads of the HTTP process (nanoseconds, user and system
together), the pipe included; beside it stands what a bare loop of recv and send costs on the same
machine at the same moment and as many writes a second: less is not to be had. The first token's
time is the client's, less what the engine process itself needed for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from strata.core.settings_load import load_settings
from strata.serve.main import make_server, run_until_stopped
from strata.serve.model_text import ModelText
from strata.serve.scripted_text import ScriptedTokenizer

WRITES_A_SECOND = 1000 / 30
"""At most, of one stream (engine_loop.PACE_S)."""


def script_of(n_tokens: int, each_ms: float) -> dict[str, object]:
    """One answer of n tokens at so many ms each, and one of a single token."""
    words = [f"word{i % 50} " for i in range(n_tokens)]
    return {
        "context": 1 << 20,
        "answers": [
            {"when": "long", "write": words, "delay_s": each_ms / 1e3},
            {"when": "short", "write": ["word1 "]},
        ],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--ms", type=float, nargs="+", default=[2, 5, 20], help="a token")
    parser.add_argument("--child", metavar="SCRIPT")
    args = parser.parse_args()
    if args.child:
        serve(Path(args.child))
        return
    print("load of the machine:", *(f"{x:.1f}" for x in os.getloadavg()))
    for i, each_ms in enumerate(args.ms):
        n_tokens = max(100, round(args.tokens * min(args.ms) / each_ms))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "script.json"
            path.write_text(json.dumps(script_of(n_tokens, each_ms)), encoding="utf-8")
            asyncio.run(measure(path, n_tokens, args.requests, each_ms, with_first=i == 0))


def serve(path: Path) -> None:
    """The server to measure, in a process of its own."""
    script = json.loads(path.read_text(encoding="utf-8"))
    text = ModelText("scripted", "qwen3_moe", ScriptedTokenizer(script))
    asked = load_settings({"port": 8311, "wire_log": "none"}, environ={})
    command = (sys.executable, "-m", "strata.serve.scripted", str(path))
    run_until_stopped(make_server("scripted", asked, command=command, text=text))


async def measure(
    path: Path, n_tokens: int, n_requests: int, each_ms: float, *, with_first: bool
) -> None:
    """Ask, count, print."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--child", str(path), stderr=asyncio.subprocess.DEVNULL
    )
    firsts: list[float] = []
    try:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8311", timeout=60) as client:
            await ready(client)
            await stream(client, "long", child.pid)
            costs = [await stream(client, "long", child.pid) for _ in range(n_requests)]
            if with_first:
                with socket.create_connection(("127.0.0.1", 8311)) as sock:
                    firsts = [await asyncio.to_thread(first, sock) for _ in range(200)]
    finally:
        child.terminate()
        await child.wait()
    write_s = max(each_ms / 1e3, 1 / WRITES_A_SECOND)
    bare = await asyncio.to_thread(bare_cost, write_s) * each_ms / 1e3 / write_s
    each = sorted(cost * 1e6 / n_tokens for cost in costs)
    print(
        f"{each_ms:g} ms a token: {statistics.median(each):.0f} us of CPU a streamed token (median "
        f"of {len(each)}, {each[0]:.0f} to {each[-1]:.0f}); a bare recv and send: {bare * 1e6:.0f}"
    )
    if firsts:
        ms = sorted(x * 1e3 for x in firsts)
        print(
            f"first token: HTTP layer adds {statistics.median(ms):.2f} ms (median of {len(ms)}), "
            f"p95 {ms[int(0.95 * len(ms))]:.2f} ms"
        )


def bare_cost(every_s: float, n: int = 100) -> float:
    """CPU seconds a turn of a loop that waits for a message on a socket pair and sends one by TCP,
    every so many seconds."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = socket.create_connection(server.getsockname())
        writer, _ = server.accept()

    def engine() -> None:
        for _ in range(n):
            time.sleep(every_s)
            theirs.send(b"x" * 60)
        theirs.close()

    def client() -> None:
        while reader.recv(65536):
            pass

    threads = [threading.Thread(target=engine), threading.Thread(target=client)]
    for thread in threads:
        thread.start()
    before = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
    while ours.recv(65536):
        writer.send(b"y" * 260)
    spent = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - before
    writer.close()
    for thread in threads:
        thread.join()
    reader.close()
    return spent / n


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


async def stream(client: httpx.AsyncClient, what: str, pid: int) -> float:
    """CPU seconds of the server while it streams one answer."""
    before = cpu_s(pid)
    async with client.stream("POST", "/v1/chat/completions", json=body(what)) as response:
        async for _ in response.aiter_raw():
            pass
    return cpu_s(pid) - before


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process (Linux)."""
    found = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text(encoding="utf-8").split()[0]) for path in found) / 1e9


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
