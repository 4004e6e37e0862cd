"""The port before the server: bound and answering while everything else is still imported.

Loading the web framework takes a second or more. A supervisor that asks /health meanwhile is told
that the process lives; whoever asks for more is told to come back. Imports nothing but the standard
library and core.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from strata.core.errors import InputError, SettingError
from strata.core.settings import Settings

BACKLOG = 512
_PATIENCE_S = 0.5
_MOST_BYTES = 1 << 16


def require_servable(model: str, settings: Settings) -> None:
    """InputError for what cannot be served at all, as far as that is seen at once."""
    require_safe_bind(settings)
    if not model.startswith("synthetic:") and not Path(model).exists():
        raise InputError(f"{model}: No such file or directory")


def require_safe_bind(settings: Settings) -> None:
    """Refuse a public address without a key, unless that is asked for."""
    if is_loopback(settings.host) or settings.api_key or settings.allow_public_without_key:
        return
    raise SettingError(
        f"--host {settings.host} is reachable from other machines and there is no --api-key; set "
        f"one, or pass --allow-public-without-key"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything else happens, so that a port in use is one line."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, address = found[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            undo.pop_all()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


class EarlyPort:
    """Answers on a listening socket, one request a connection, until it is handed over."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="early port", daemon=True)

    def __enter__(self) -> EarlyPort:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hand_over().close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def hand_over(self) -> socket.socket:
        """Stop answering; the socket, still listening: who connects now waits for its new owner."""
        if self._thread.is_alive():
            self._stop.send(b"x")
            self._thread.join()
        for end in (self._stop, self._stopped):
            end.close()
        return self._listener

    def _run(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            while all(key.fileobj is self._listener for key, _ in selector.select()):
                with contextlib.suppress(OSError):  # gone again, or too slow
                    client, _ = self._listener.accept()
                    with client:
                        _answer(client)


def _answer(client: socket.socket) -> None:
    """One request: alive, or not ready. OSError when the client does not get on with it."""
    client.settimeout(_PATIENCE_S)
    head, until = b"", time.monotonic() + _PATIENCE_S
    while b"\r\n\r\n" not in head and len(head) < _MOST_BYTES and time.monotonic() < until:
        data = client.recv(_MOST_BYTES)
        if not data:
            break
        head += data
    path = head.split(b" ", 2)[1] if head.count(b" ") >= 2 else b""
    if path.split(b"?")[0] == b"/health":
        status, body = "200 OK", json.dumps({"status": "ok"})
    else:
        message = "not ready (starting): the server is starting"
        error = {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
        status, body = "503 Service Unavailable\r\nretry-after: 1", json.dumps({"error": error})
    fixed = "content-type: application/json\r\nconnection: close"
    answer = f"HTTP/1.1 {status}\r\n{fixed}\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    client.sendall(answer.encode())
    client.shutdown(socket.SHUT_WR)
    while time.monotonic() < until and client.recv(_MOST_BYTES):
        pass  # closing over a body that nobody has read would take the answer back
