"""Who is let in: key, host, origin, body size. Case C38 walks the server's own list of routes."""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from strata.core.errors import SettingError
from strata.core.settings import Settings
from strata.serve.early import require_safe_bind
from tests.serve.kit import Running, messages

KEY = "k-3cr3t"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key and a small limit."""
    script = {"answers": [{"when": "hi", "write": ["ho"]}]}
    more = {"api_key": KEY, "max_body_mb": 0.01, "allowed_origins": ["https://chat.example"]}
    server = Running(tmp_path_factory.mktemp("locked"), script, **more)
    yield server
    server.stop()


def routes(server: Running) -> list[tuple[str, str]]:
    """(method, path) of every route there is, path parameters filled in."""
    found: list[tuple[str, str]] = []

    def walk(items: Any) -> None:
        for route in items:
            if getattr(route, "routes", None) and not hasattr(route, "methods"):
                walk(route.routes)
                continue
            for method in getattr(route, "methods", ()) or ():
                found.append((method, re.sub(r"{[^}]*}", "x", route.path)))

    walk(server.app.routes)
    return found


def test_c38_key_on_every_route(locked: Running) -> None:
    listed = routes(locked)
    spec = locked.get("/openapi.json").json()["paths"]
    paths = {path for _, path in listed}
    assert len(spec) >= 13 and {re.sub(r"{[^}]*}", "x", p) for p in spec} <= paths
    for method, path in listed:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
        ):
            headers = {"Authorization": "", **headers}
            response = locked.client.request(method, path, headers=headers)
            if path == "/health":
                assert response.status_code == 200
            else:
                assert response.status_code == 401, (method, path, headers)
        allowed = locked.client.request(method, path)
        assert allowed.status_code not in (401, 403), (method, path)
    assert locked.get("/no/such/route", headers={"Authorization": ""}).status_code == 401


def test_every_way_to_show_the_key(locked: Running) -> None:
    basic = "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()
    for headers in (
        {"Authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"Authorization": basic},
    ):
        headers = {"Authorization": "", **headers}
        assert locked.get("/v1/models", headers=headers).status_code == 200


def test_wrong_keys_in_every_form(locked: Running) -> None:
    wrong = base64.b64encode(b"me:no").decode()
    for headers in (
        {"x-api-key": KEY[:-1]},
        {"Authorization": f"Basic {wrong}"},
        {"Authorization": "Basic !!!"},
        {"Authorization": KEY},
    ):
        headers = {"Authorization": "", **headers}
        assert locked.get("/v1/models", headers=headers).status_code == 401


def test_the_key_is_never_shown(locked: Running) -> None:
    for path in ("/v1/status", "/metrics", "/openapi.json"):
        assert KEY not in locked.get(path).text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:9"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://chat.example"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_other_pages_are_kept_out(locked: Running, headers: dict[str, str], status: int) -> None:
    assert locked.get("/v1/models", headers=headers).status_code == status
    assert locked.get("/health", headers=headers).status_code == status


def test_an_allowed_page_gets_its_headers(locked: Running) -> None:
    origin = {"Origin": "https://chat.example"}
    asked = locked.client.options("/v1/chat/completions", headers={**origin, "Authorization": ""})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    assert locked.get("/v1/models", headers=origin).headers["access-control-allow-origin"]
    assert "access-control-allow-origin" not in locked.get("/v1/models").headers


def test_an_allowed_page_may_send_and_read_what_client_libraries_do(locked: Running) -> None:
    """The official libraries name themselves in headers (x-stainless-*, anthropic-version)."""
    wanted = "anthropic-version, x-api-key, x-stainless-lang"
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Headers": wanted}
    response = locked.client.options("/v1/messages", headers={**asked, "Authorization": ""})
    assert response.headers["access-control-allow-headers"] == wanted
    shown = response.headers["access-control-expose-headers"]
    assert "x-strata-warnings" in shown and "retry-after" in shown


def test_the_own_page_may_ask(locked: Running) -> None:
    same = {"Origin": f"http://127.0.0.1:{locked.port}"}
    assert locked.get("/v1/models", headers=same).status_code == 200


def test_large_bodies_are_refused_however_they_come(locked: Running) -> None:
    body = messages("x" * 20_000)
    assert locked.post("/v1/chat/completions", body).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 1000

    headers = {"Content-Type": "application/json"}
    response = locked.client.post("/v1/chat/completions", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert locked.post("/v1/chat/completions", messages("hi")).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"messages": 5}', b'{"messages": [5]}', b"\xff\xfe",
     b'{"messages": [{"role": "user", "content": "hi"}], "n": 1e400}',
     b'{"messages": [{"role": "user", "content": "\\ud800"}], "stop": "\\ud800"}',
     b"[" * 5000],
)  # fmt: skip
def test_malformed_bodies(locked: Running, raw: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        headers = {"Content-Type": "application/json"}
        response = locked.client.post(path, content=raw, headers=headers)
        # the lone surrogate is a legal request for the chat route alone
        assert response.status_code in ((400, 200) if b"ud800" in raw else (400,)), response.text
        assert response.status_code == 200 or "error" in response.json()
    assert locked.chat("hi")["choices"][0]["message"]["content"] == "ho"


def test_broken_http_does_not_stop_the_server(locked: Running) -> None:
    for raw in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", locked.port), timeout=5) as sock:
            sock.sendall(raw)
    assert locked.get("/health").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(SettingError, match="--api-key"):
        require_safe_bind(Settings(host=host))
    require_safe_bind(Settings(host=host, api_key="k"))
    require_safe_bind(Settings(host=host, allow_public_without_key=True))
    require_safe_bind(Settings(host="127.0.0.1"))
    require_safe_bind(Settings(host="::1"))
