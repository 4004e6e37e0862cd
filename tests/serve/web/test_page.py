"""The page in a real browser against a scripted server.

Needs playwright and a Chromium; skipped, saying so, where one of them is missing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.serve.web import POLICY, load_page
from tests.serve.web.site import EVIL, LAYERS, Script, serving

WEB = Path(__file__).resolve().parents[3] / "src" / "strata" / "serve" / "web"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
    with api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium starts here: {str(error).splitlines()[0]}")
        yield made
        made.close()


@pytest.fixture(scope="module")
def opened(browser: Any) -> Iterator[tuple[Any, Script, list[str]]]:
    """(the open page, its server's script, what went wrong in the page)."""
    troubles: list[str] = []
    script = Script()
    with serving(script) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        made = context.new_page()
        made.on("pageerror", lambda error: troubles.append(str(error)))
        made.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        made.on(
            "request",
            lambda r: None if r.url.startswith((address, "data:")) else troubles.append(r.url),
        )
        made.goto(address)
        made.wait_for_selector("#state[data-state=ready]")
        yield made, script, troubles
        context.close()


@pytest.fixture
def page(opened: tuple[Any, Script, list[str]]) -> Iterator[Any]:
    """The page with a new chat; a message in its console, a fault or a request elsewhere fails."""
    made, script, troubles = opened
    script.asked.clear()
    made.click("#new")
    yield made
    assert [t for t in troubles if "status of 40" not in t] == []


@pytest.fixture
def script(opened: tuple[Any, Script, list[str]]) -> Script:
    return opened[1]


def until(page: Any, expression: str) -> None:
    """Wait for something true; page.wait_for_function would need eval, which the policy forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {expression}")


def say(page: Any, text: str) -> Any:
    """Send a message and wait for the end of its answer."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send:not([hidden])")
    return page.locator("#log > li.assistant").last


def test_streams_and_goes_on(page: Any, script: Script) -> None:
    assert say(page, "hello").locator(".text").inner_text() == "You said: hello (1)"
    assert "2 tokens" in page.locator(".note").inner_text()
    assert "prompt 9, 4 reused" in page.locator(".note").inner_text()
    say(page, "more")
    assert [m["role"] for m in script.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert script.asked[1]["stream_options"] == {"include_usage": True}
    page.click("#new")
    say(page, "again")
    assert len(script.asked[2]["messages"]) == 1


def test_thinking_is_folded(page: Any, script: Script) -> None:
    answer = say(page, "think please")
    thought = answer.locator("details.thought")
    assert thought.get_attribute("open") is None
    assert re.match(r"Thought for \d+\.\d s", thought.locator("summary").inner_text())
    thought.locator("summary").click()
    assert thought.locator("div").inner_text() == "First I count the sheep."
    say(page, "next")
    assert "sheep" not in str(script.asked[1]["messages"])


def test_stop_by_button_and_by_key(page: Any, script: Script) -> None:
    for how in ("button", "Escape"):
        script.left.clear()
        page.fill("#prompt", "slow")
        page.press("#prompt", "Enter")
        until(page, "document.querySelector('#log > li:last-child .text').innerText !== ''")
        page.click("#stop") if how == "button" else page.keyboard.press("Escape")
        page.wait_for_selector("#send:not([hidden])")
        assert "stopped" in page.locator(".note").last.inner_text()
        assert script.left.wait(5)


def test_regenerate(page: Any, script: Script) -> None:
    say(page, "one")
    page.click(".again")
    until(page, "document.body.innerText.includes('(2)')")
    assert page.locator("#log > li.assistant").count() == 1
    assert script.asked[0]["messages"] == script.asked[1]["messages"]


def test_markdown_becomes_elements(page: Any) -> None:
    answer = say(page, "markdown").locator(".text")
    for selector in (
        "h2",
        "strong",
        "em",
        "p > code",
        "ul > li > ul > li",
        "ol > li",
        "table td strong",
    ):
        assert answer.locator(selector).count() >= 1, selector
    assert answer.locator("pre code").inner_text() == "print('<b>')"
    assert answer.locator("a").get_attribute("href") == "https://example.org/x"
    assert "noopener" in answer.locator("a").get_attribute("rel")


def test_text_of_the_model_is_never_markup(page: Any) -> None:
    answer = say(page, "evil").locator(".text")
    assert answer.inner_text() == EVIL
    assert answer.locator("img, script, a").count() == 0 and page.title() == "Strata"


def test_errors_are_said(page: Any) -> None:
    answer = say(page, "refuse")
    assert answer.locator("[role=alert]").inner_text() == "the prompt has 9 tokens too many"


def test_monitor_shows_rows_memory_and_speed(page: Any, script: Script) -> None:
    script.quality = {
        "conditional_kl": 0.005, "conditional_top1": 0.981, "conditional_positions": 640,
        "cumulative_positions": 0,
    }  # fmt: skip
    until(page, "document.querySelector('#speed').innerText > 0")
    assert page.locator("#rows rect.fast").count() == LAYERS
    assert "VRAM" in page.locator("#legend").inner_text()
    assert page.locator("#timeline rect").count() == LAYERS - 1
    memory = page.locator("#memory").inner_text()
    assert "20.0 GiB of 24.0 GiB" in memory and "61.0 GiB of 96.0 GiB" in memory
    assert "71.2 %" in page.locator("#facts").inner_text()
    page.wait_for_selector("#quality-box:not([hidden])")
    words = page.locator("#quality-text").inner_text()
    assert "Budget 0.02 nats, 25.0 % of it measured" in words
    assert "KL 0.0050 nats, top-1 98.1 %, 640 tokens" in words


def test_key_field(browser: Any) -> None:
    script = Script(key="sesame")
    with serving(script) as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "sesame")
        page.press("#key", "Enter")
        page.wait_for_selector("#state[data-state=ready]")
        assert say(page, "hi").locator(".text").inner_text() == "You said: hi (1)"
        page.context.close()


def test_theme_follows_the_system_and_the_button(page: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(paper) == light
    page.reload()
    assert page.evaluate(paper) == light
    page.emulate_media(color_scheme="light")


def test_keyboard_and_narrow_screen(page: Any) -> None:
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.set_viewport_size({"width": 380, "height": 700})
    assert not page.locator("#monitor").is_visible()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.locator("#monitor").is_visible() and not page.locator("#chat").is_visible()
    assert page.evaluate("document.activeElement.id") == "tab-monitor"
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.click("#tab-chat")
    page.set_viewport_size({"width": 1280, "height": 800})


def test_policy_and_files_keep_to_the_rules() -> None:
    files = load_page()
    assert set(files) == {
        "/",
        *(f"/web/{name}" for name in ("app.js", "markdown.js", "monitor.js", "style.css")),
    }
    for asset in files.values():
        assert asset.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY
    for path in WEB.iterdir():
        if path.suffix in (".js", ".html"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|\bon\w+=", text)
            assert not re.findall(r"https?://(?!www\.w3\.org)\w", text), path.name
