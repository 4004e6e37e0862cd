"""Clients that leave, engines that hang or die, and loading: cases C34, C35, C37, C40, C41, C45.

Times are those that the cases set; faults are scripted, processes and sockets are real.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.kit import Running, content, messages, running, wait_for

CHAT = "/v1/chat/completions"
KETTLE = "seven green kettles boil"


def raw_request(server: Running, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def read_chunks(sock: socket.socket, n: int) -> bytes:
    """At least n chunks of a stream."""
    data = b""
    while data.count(b"data: ") < n:
        more = sock.recv(65536)
        assert more, "the stream ended"
        data += more
    return data


@pytest.mark.parametrize("stream", [True, False])
def test_c34_client_leaves(served: Running, stream: bool) -> None:
    before = served.metric("vllm:request_success_total", finished_reason="cancelled")
    sock = raw_request(served, {**messages("slow"), "stream": stream})
    if stream:
        read_chunks(sock, 3)
    else:
        wait_for(lambda: served.status["queue"]["running"] is not None)
    waiting: list[float] = []

    def ask() -> None:
        served.text("the kettle")
        waiting.append(time.monotonic())

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: len(served.status["queue"]["waiting"]) == 1)
    assert served.status["queue"]["waiting"][0]["position"] == 1
    left = time.monotonic()
    sock.close()
    thread.join(10)
    assert waiting[0] - left < 1.0
    assert wait_for(served.idle) < 1.0
    after = served.metric("vllm:request_success_total", finished_reason="cancelled")
    assert after == before + 1


def test_leaving_while_a_long_prompt_is_read_or_while_waiting(served: Running) -> None:
    first = raw_request(served, {**messages("heavy"), "stream": True})
    wait_for(lambda: served.status["queue"]["running"] is not None)
    second = raw_request(served, messages("slow"))
    wait_for(lambda: len(served.status["queue"]["waiting"]) == 1)
    second.close()
    assert wait_for(lambda: not served.status["queue"]["waiting"]) < 1.0
    first.close()
    assert wait_for(served.idle) < 1.0


def test_c35_abort_then_ask_again(served: Running) -> None:
    for i in range(20):
        sock = raw_request(served, {**messages(f"slow {i}"), "stream": True})
        read_chunks(sock, 3)
        sock.close()
        body = messages("the kettle")
        answer = served.post(CHAT, body).json()
        assert answer["choices"][0]["message"]["content"] == KETTLE
        assert answer["usage"]["completion_tokens"] == 10  # with the end token
        assert answer["usage"]["prompt_tokens"] == len(b"the kettle") + 3


def test_200_aborts_at_any_time(served: Running) -> None:
    """Whatever moment a client leaves at, nothing stays behind."""
    connections: list[socket.socket] = []
    for i in range(200):
        sock = raw_request(served, {**messages(f"slow {i}"), "stream": i % 2 == 0})
        connections.append(sock)
        if i % 5 == 4:
            time.sleep(0.002 * (i % 7))
            while connections:
                connections.pop().close()
    assert wait_for(served.idle, 10) < 10
    assert served.text("the kettle") == KETTLE


def test_a_slow_reader_holds_up_nobody(served: Running) -> None:
    slow = raw_request(served, {**messages("long answer"), "stream": True})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert served.text("the kettle") == KETTLE
    data = b""
    while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        data += slow.recv(700)
    slow.close()
    texts = [json.loads(line[6:]) for line in data.split(b"\n\n") if b'"choices"' in line
             for line in [line[line.index(b"data: "):]]]  # fmt: skip
    assert content(texts) == "".join(f"{i} " for i in range(300))


@pytest.mark.parametrize("fault", ["die", "silent", "deaf"])
def test_c37_silent_engine(tmp_path: Path, fault: str) -> None:
    """Within the silence limit the request ends with an error, the next one works, and readiness
    shows the fault meanwhile."""
    bad = {"when": "go wrong", "write": ["a ", "b ", "c "], "fault": fault, "at": 2}
    script = {"answers": [bad, {"when": "", "write": ["fine"]}]}
    with running(tmp_path, script, silence_s=1.2) as server:
        first = server.status["engine"]["pid"]
        body = {**messages("go wrong"), "stream": True}
        start = time.monotonic()
        with server.client.stream("POST", CHAT, json=body) as response:
            if fault == "deaf":  # moves, so only a cancel shows that it does not listen
                for piece in response.iter_text():
                    if '"content":"a' in piece:
                        break
            else:
                text = "".join(response.iter_text())
                assert '"error"' in text and text.endswith("data: [DONE]\n\n")
                assert time.monotonic() - start < 4
        wait_for(lambda: server.get("/ready").status_code == 503, 4)
        fact = server.get("/ready").json()
        assert fact["last_fault"] and fact["phase"] == "restarting"
        assert fact["progress"] < 1
        assert server.get("/health").status_code == 200
        refused = server.post(CHAT, messages("hi"))
        assert refused.status_code == 503 and refused.headers["retry-after"]
        server.wait_ready()
        assert server.text("hi") == "fine"
        assert server.status["engine"]["pid"] != first
        assert server.metric("strata:engine_faults_total") == 1


def test_c37_a_slow_but_moving_prompt_is_not_killed(tmp_path: Path) -> None:
    script = {"answers": [{"when": "", "write": ["fine"], "prompt_s": 3}]}
    with running(tmp_path, script, silence_s=0.8) as server:
        assert server.text("hi") == "fine"
        assert server.status["engine"]["faults"] == 0


def test_kill_9_while_streaming_and_the_queue_survives(tmp_path: Path) -> None:
    slow = {"when": "slow", "write": [f"{i} " for i in range(500)], "delay_s": 0.02}
    with running(tmp_path, {"answers": [slow, {"when": "", "write": ["fine"]}]}) as server:
        sock = raw_request(server, {**messages("slow"), "stream": True})
        read_chunks(sock, 4)
        later: list[str] = []
        thread = threading.Thread(target=lambda: later.append(server.text("hi")))
        thread.start()
        wait_for(lambda: len(server.status["queue"]["waiting"]) == 1)
        os.kill(server.status["engine"]["pid"], signal.SIGKILL)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
        sock.close()
        assert b"engine_unavailable" in data and b"signal 9" in data
        thread.join(20)
        assert later == ["fine"]


def test_c40_health_while_loading(tmp_path: Path) -> None:
    script = {"load_s": 2.0, "answers": [{"when": "", "write": ["fine"]}]}
    with running(tmp_path, script, wait=False) as server:
        wait_for(lambda: _answers(server), 1.0)
        seen = [0.0]
        while (response := server.get("/ready")).status_code == 503:
            fact = response.json()
            assert fact["phase"] in ("starting", "loading") and response.headers["retry-after"]
            seen.append(fact["progress"])
            assert server.get("/health").json() == {"status": "ok"}
            list(text_string_to_metric_families(server.get("/metrics").text))
            refused = server.post(CHAT, messages("hi"))
            if server.get("/ready").status_code == 503:  # else it became ready just now
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            time.sleep(0.05)
        assert seen == sorted(seen) and len(set(seen)) > 5
        assert server.text("hi") == "fine"


def _answers(server: Running) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_stop_while_loading_does_not_wait(tmp_path: Path) -> None:
    server = Running(tmp_path, {"load_s": 20.0}, wait=False)
    wait_for(lambda: server.get("/ready").json()["phase"] == "loading")
    pid = server.status["engine"]["pid"]
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 5
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("window", [1, 4])
def test_c41_metrics_add_up(tmp_path: Path, window: int) -> None:
    """Zeros at first; then token counters equal the sum of the reported usage."""
    slow = {"when": "slow", "write": [f"{i} " for i in range(200)], "delay_s": 0.02}
    kettle = {"when": "kettle", "write": ["seven", " green", " kett", "les", " boil"]}
    with running(tmp_path, {"window": window, "answers": [slow, kettle]}) as server:
        page = server.get("/metrics").text
        families = {f.name: f for f in text_string_to_metric_families(page)}
        names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        samples = [s for f in families.values() for s in f.samples]
        assert all(s.value == s.value for s in samples)  # no NaN
        assert sum(s.value for s in samples if s.name == "vllm:generation_tokens_total") == 0
        whole = server.post(CHAT, messages("the kettle")).json()["usage"]
        options = {"stream_options": {"include_usage": True}, "stop": ["en kettles"]}
        streamed = server.chunks(CHAT, {**messages("the kettle"), **options})
        assert content(streamed) == "seven gre"
        sock = raw_request(server, {**messages("slow"), "stream": True})
        read_chunks(sock, 3)
        sock.close()
        wait_for(server.idle)
        usages = [whole, streamed[-1]["usage"]]
        for name, field in (
            ("vllm:prompt_tokens_total", "prompt_tokens"),
            ("vllm:generation_tokens_total", "completion_tokens"),
        ):
            assert server.metric(name) == sum(u[field] for u in usages)
        assert server.metric("vllm:request_success_total", finished_reason="cancelled") == 1
        assert server.metric("vllm:time_to_first_token_seconds_count") == 2
        drafts = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert (drafts > 0) == (window > 1)


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    slow = {"when": "slow", "write": [f"{i} " for i in range(200)], "delay_s": 0.02}
    with running(tmp_path, {"answers": [slow]}, max_queue=1) as server:
        sockets = [raw_request(server, messages("slow")) for _ in range(2)]
        wait_for(lambda: len(server.status["queue"]["waiting"]) == 1)
        response = server.post(CHAT, messages("slow"))
        assert response.status_code == 503 and response.json()["error"]["code"] == "queue_full"
        for sock in sockets:
            sock.close()
        wait_for(server.idle)
