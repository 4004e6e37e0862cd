"""The port before the server: alive at once, not ready, and nobody is lost at the hand-over."""

from __future__ import annotations

import socket
import time

import httpx

from strata.serve.early import EarlyPort, listen


def test_alive_but_not_ready() -> None:
    with EarlyPort(listen("127.0.0.1", 0)) as port:
        url = f"http://127.0.0.1:{port.address[1]}"
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        answer = httpx.post(f"{url}/v1/chat/completions", content=b"x" * 300_000)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "not_ready"


def test_who_says_nothing_holds_nobody_up_for_long() -> None:
    with EarlyPort(listen("127.0.0.1", 0)) as port, socket.create_connection(port.address):
        start = time.monotonic()
        url = f"http://127.0.0.1:{port.address[1]}/health"
        assert httpx.get(url, timeout=5).status_code == 200
        assert time.monotonic() - start < 3


def test_who_connects_after_the_hand_over_waits_for_the_new_owner() -> None:
    with EarlyPort(listen("127.0.0.1", 0)) as port:
        address = port.address
        listener = port.hand_over()
        with socket.create_connection(address) as client:
            client.sendall(b"hello")
            listener.settimeout(5)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(5) == b"hello"
