"""The engine process's end of the pipe: blocking sends from any thread, one thread that reads.

Knows no models. When the other end is gone the process has no reason to live: ``on_gone`` is called
once, from the reading thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from strata.serve.messages import Frames, Message, ProtocolError, encode


class Pipe:
    """One end; ``receive`` is called in a thread of its own for each message."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send, in one piece. A gone reader is not the sender's trouble: ``on_gone`` deals with
        it."""
        data = encode(message)
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def listen(self, receive: Callable[[Message], None], on_gone: Callable[[], None]) -> None:
        """Start the reading thread."""

        def loop() -> None:
            frames = Frames()
            try:
                while data := self._socket.recv(1 << 16):
                    for message in frames.feed(data):
                        receive(message)
            except (OSError, ProtocolError):
                pass
            on_gone()

        threading.Thread(target=loop, name="pipe", daemon=True).start()
