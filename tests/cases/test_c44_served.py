"""C44: every setting of the server has an effect that is seen here; expectations are their help.

No engine is started: the application is asked without its engine, or the part that reads the
setting is. A new setting of the server without an entry fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import strata
from strata import cli
from strata.core.errors import InputError, SettingError
from strata.core.settings import SETTINGS
from strata.core.settings_load import load_settings
from strata.serve import main
from strata.serve.app import make_app
from strata.serve.early import require_safe_bind
from strata.serve.model_text import ModelText
from strata.serve.server import Server

FIXTURE = Path(__file__).parent.parent / "fixtures" / "llama" / "bf16.gguf"
NAMES = [name for name, info in SETTINGS.items() if info.scope == "serve"]


def server(**settings: Any) -> Server:
    asked = load_settings(settings, environ={})
    return main.make_server(str(FIXTURE), asked, text=ModelText("m", why_not=""))


def asked_for(path: str, headers: dict[str, str], body: Any = None, **settings: Any) -> int:
    """Status of one request to an application whose engine does not run."""

    async def ask() -> int:
        transport = httpx.ASGITransport(app=make_app(server(**settings)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            way = "GET" if body is None else "POST"
            return (await client.request(way, path, headers=headers, json=body)).status_code

    return asyncio.run(ask())


def key() -> None:
    assert asked_for("/v1/models", {}, api_key="k") == 401
    assert asked_for("/v1/models", {"x-api-key": "k"}, api_key="k") == 200


def hosts() -> None:
    assert asked_for("/v1/models", {"host": "box"}) == 421
    assert asked_for("/v1/models", {"host": "box"}, allowed_hosts=["box"]) == 200


def origins() -> None:
    page = {"origin": "https://a.example"}
    assert asked_for("/v1/models", page) == 403
    assert asked_for("/v1/models", page, allowed_origins=["https://a.example"]) == 200


def body_size() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 4000}]}
    assert asked_for("/v1/chat/completions", {}, body, max_body_mb=0.003) == 413
    assert asked_for("/v1/chat/completions", {}, body) != 413


def public() -> None:
    with pytest.raises(SettingError, match="--allow-public-without-key"):
        require_safe_bind(load_settings({"host": "0.0.0.0"}, environ={}).settings)
    given = {"host": "0.0.0.0", "allow_public_without_key": True}
    require_safe_bind(load_settings(given, environ={}).settings)


def listening() -> None:
    with main.listen("127.0.0.2", 0) as first:
        host, port = first.getsockname()[:2]
        assert host == "127.0.0.2"
        with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.2:{port}: "):
            main.listen("127.0.0.2", port)


def model_names() -> None:
    asked = load_settings({"served_name": "other"}, environ={})
    assert main.make_server(str(FIXTURE), asked).text.name == "other"


def any_name() -> None:
    server(any_model_name=True).require_model("ghost")
    with pytest.raises(Exception, match="ghost"):
        server().require_model("ghost")


def queue() -> None:
    assert server(max_queue=3).link.jobs._most == 3


def silence() -> None:
    assert server(silence_s=7.5).link._silence_s == 7.5


def drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What uvicorn is told."""
    told: list[Any] = []

    class Told(Exception):
        pass

    def config(*args: Any, **more: Any) -> None:
        told.append(more["timeout_graceful_shutdown"])
        raise Told

    monkeypatch.setattr(main.uvicorn, "Config", config)
    with main.listen("127.0.0.1", 0) as listener:
        monkeypatch.setattr(main, "listen", lambda host, port: listener)
        with pytest.raises(Told):
            asyncio.run(main.run_server(server(drain_s=7.0)))
    assert told == [7]


def wire_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "run_until_stopped", lambda *server: 0)
    call = ["serve", str(FIXTURE), "--device", "cpu", "--port", "0", "--wire-log"]
    before = main.LOG.level
    try:
        for value, level in (("none", logging.WARNING), ("requests", logging.INFO)):
            assert cli.main([*call, value]) == 0
            assert main.LOG.level == level
    finally:
        main.LOG.setLevel(before)


SERVED: dict[str, Callable[..., None]] = {
    "host": listening, "port": listening, "api_key": key, "allow_public_without_key": public,
    "allowed_hosts": hosts, "allowed_origins": origins, "served_name": model_names,
    "any_model_name": any_name, "max_queue": queue, "max_body_mb": body_size, "silence_s": silence,
    "drain_s": drain, "wire_log": wire_log,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_servers_setting_is_obeyed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = SERVED[name]
    look(monkeypatch) if look in (drain, wire_log) else look()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused_where_nothing_is_served(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingError, match=f"{name} is a setting of strata serve"):
        strata.load(FIXTURE, device="cpu", **{name: SETTINGS[name].default})
    flag = SETTINGS[name].flag
    assert cli.main(["run", str(FIXTURE), "hi", "--device", "cpu", flag, "1"]) == 2
    assert f"{flag} has no effect here: it is a setting of strata" in capsys.readouterr().err
