"""The page in a real browser on the real HTTP process with a scripted engine. See test_page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serve.kit import running, wait_for
from tests.serve.web.test_page import browser, say, until

__all__ = ["browser"]

SCRIPT = {
    "context": 2000,
    "template": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{{ '<|assistant|><think>\n' }}"
    ),
    "answers": [
        {"when": "slow", "write": ["</think>", *(f"w{i} " for i in range(900))], "delay_s": 0.02},
        {
            "when": "kettle",
            "write": ["It must ", "boil", "</think>", "Seven ", "**green** kettles"],
        },
    ],
}


def test_chat_stop_and_monitor_behind_a_key(browser: Any, tmp_path: Path) -> None:
    with running(tmp_path, SCRIPT, api_key="sesame") as server:
        # what a person types into the browser's own question for a password
        credentials = {"username": "strata", "password": "sesame"}
        context = browser.new_context(http_credentials=credentials)
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ready]")
        answer = say(page, "kettle?")
        assert answer.locator(".text").inner_text() == "Seven green kettles"
        assert answer.locator(".text strong").inner_text() == "green"
        assert answer.locator(".thought div").text_content() == "It must boil"
        assert "6 tokens" in answer.locator(".note").inner_text()
        page.fill("#prompt", "slow")
        page.press("#prompt", "Enter")
        until(page, "document.querySelector('#log > li:last-child .text').innerText !== ''")
        until(page, "document.querySelector('#state').textContent === 'working'")
        until(page, "Number(document.querySelector('#speed').textContent) > 0")
        page.click("#stop")
        wait_for(server.idle, 5)
        context.close()
