"""The door: key, host, origin and body size are looked at before any route is.

A plain ASGI wrapper around the whole application, so a new route is behind it without extra work.
Who is kept out: anybody without the key (but for /health), other web pages in a visitor's browser
(their Origin), and pages that point their own host name at this machine (DNS rebinding).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from strata.core.settings import Settings
from strata.serve.early import is_loopback
from strata.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_ANY = frozenset({"0.0.0.0", "::", ""})
_HEADERS = "authorization, content-type, x-api-key"
_SHOWN = b"x-request-id, x-strata-mode, x-strata-warnings, retry-after"


class Guard:
    """Wraps an application; see the module."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._key = _digest(settings.api_key) if settings.api_key else None
        self._limit = int(settings.max_body_mb * (1 << 20))
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        named = {settings.host.lower(), *(host.lower() for host in settings.allowed_hosts)}
        self._hosts = _LOCAL | (named - _ANY)
        public = not is_loopback(settings.host)
        if public:
            self._hosts |= {socket.gethostname().lower()}
        self._any_address = public
        # a page that was let in by its host name still would not know the key
        self._any_host = public and self._key is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin")
        allowed = origin is not None and origin.rstrip("/").lower() in self._origins
        if allowed:
            asked = headers.get(b"access-control-request-headers", _HEADERS)
            send = _with_cors(send, str(origin), asked)
        try:
            self._check_place(scope, headers, origin, allowed)
            if allowed and scope["method"] == "OPTIONS":
                await _answer(send, 204, b"", [])
                return
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            length = headers.get(b"content-length", "0")
            if length.isdigit() and int(length) > self._limit:
                raise self._too_large()
        except ApiError as error:
            await _refuse(scope, send, error)
            return
        if headers.get(b"transfer-encoding"):
            receive = self._counted(receive)
        await self._app(scope, receive, send)

    def _check_place(
        self, scope: Scope, headers: dict[bytes, str], origin: str | None, allowed: bool
    ) -> None:
        host = _host_name(headers.get(b"host", ""))
        known = host in self._hosts or (self._any_address and _is_address(host))
        if not known and not self._any_host:
            raise ApiError(
                421, f"this server does not answer for the host {host!r}; see --allowed-hosts",
                "host_not_allowed",
            )  # fmt: skip
        if allowed:
            return
        own = f"{scope['scheme']}://{headers.get(b'host', '')}".lower()
        if origin is not None and origin.lower() != own:
            raise ApiError(
                403, f"requests from the page {origin!r} are not allowed; see --allowed-origins",
                "origin_not_allowed",
            )  # fmt: skip
        if origin is None and headers.get(b"sec-fetch-site") == "cross-site":
            raise ApiError(403, "requests from other pages are not allowed", "origin_not_allowed")

    def _check_key(self, headers: dict[bytes, str]) -> None:
        if self._key is None:
            return
        found = [hmac.compare_digest(_digest(key), self._key) for key in _keys(headers)]
        if not any(found):
            what = "this key is not right" if found else "this server asks for a key"
            raise ApiError(401, f"{what}; send it as Authorization: Bearer KEY", "invalid_api_key")

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._limit} bytes (--max-body-mb)", "body_too_large"
        )


def _digest(key: str) -> bytes:
    """Of equal length for every key, so that comparing tells nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _keys(headers: dict[bytes, str]) -> Iterable[str]:
    """Keys a request shows: bearer, Anthropic's header, or a browser's password."""
    if b"x-api-key" in headers:
        yield headers[b"x-api-key"].strip()
    scheme, _, rest = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield rest.strip()
    elif scheme.lower() == "basic":
        try:
            yield base64.b64decode(rest, validate=True).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return


def _host_name(host: str) -> str:
    """Without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _with_cors(send: Send, origin: str, asked: str) -> Send:
    """Let the page in; asked: the headers it wants to send, which the client libraries name."""

    async def with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-allow-headers", asked.encode("latin-1")),
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-expose-headers", _SHOWN),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return with_cors


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    body = json.dumps(error.body(scope["path"])).encode()
    extra = [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
    if error.status == 413:
        extra.append((b"connection", b"close"))
    await _answer(send, error.status, body, [(b"content-type", b"application/json"), *extra])


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
