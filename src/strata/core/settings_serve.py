"""Settings of the server; ``settings.Settings`` is made of these and of its own.

Knows no sockets. Scope "serve" means: read by ``strata serve`` when it starts, and by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core.setting_kinds import choice, integer, number, switch, text, texts

MOST_S = 1_000_000
"""Clocks of the operating system take no more than some 60,000 years; eleven days are enough."""


@dataclass(frozen=True)
class ServeSettings:
    """How the server listens, whom it lets in, how long it waits, and what it keeps."""

    # fmt: off
    host: str = text(
        "127.0.0.1", "Address to listen on. Anything but this machine needs --api-key.",
        scope="serve")
    port: int = integer(
        8080, 0, 65535, "Port to listen on; 0 takes a free one and prints it.", scope="serve")
    api_key: str = text(
        "", "Key that every route but /health asks for (Authorization: Bearer, x-api-key, or as a "
        "browser's password).", secret=True, scope="serve")
    allow_public_without_key: bool = switch(
        False, "Listen on a public address although there is no --api-key.", scope="serve")
    allowed_hosts: tuple[str, ...] = texts(
        "Host name that requests may ask for besides this machine's own; guards against other web "
        "pages (DNS rebinding). May be given more than once.", scope="serve")
    allowed_origins: tuple[str, ...] = texts(
        "Origin of another web page that may send requests (https://chat.example). May be given "
        "more than once.", scope="serve")
    served_name: str = text(
        "", "Name of the model in the API; none is the file's or folder's own.", scope="serve")
    any_model_name: bool = switch(
        False, "Answer requests for any model name; the response then says the true one.",
        scope="serve")
    max_queue: int = integer(
        64, 1, None, "Most requests that wait; more are answered 503 with Retry-After.",
        unit="requests", scope="serve")
    max_body_mb: float = number(
        16.0, 0.001, 1024, "Largest request body.", unit="MiB", scope="serve")
    silence_s: float = number(
        120.0, 0.1, MOST_S, "The engine is restarted when it makes no progress on a request, or "
        "gives no sign of life, for so long.", unit="s", scope="serve")
    drain_s: float = number(
        20.0, 0, MOST_S, "At shutdown, how long running answers may go on.", unit="s",
        scope="serve")
    wire_log: str = choice(
        "requests", ("none", "requests"),
        "requests: one line in the log for each request, without its text.", scope="serve")

    checkpoints: int = integer(
        6, 0, 64, "Places of a conversation that can be gone back to, kept as copies of recurrent "
        "state; 0 reads every prompt that does not continue the last one from its beginning.",
        unit="copies")
    park_gb: float = number(
        -1.0, 0, 1 << 20,
        "Main memory for conversations that were left for another one; auto takes up to 2 GiB "
        "while 2 GiB stay free, 0 parks none.", unit="GiB", auto=-1.0)
    park_dir: str = text(
        "", "Folder where conversations are kept when the model is closed, and found again.",
        kind="DIR")
    # fmt: on
