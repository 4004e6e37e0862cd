"""Bodies that are no bodies, and results of tools that nobody has called: each a 400 that says
what is wrong. Statuses are those of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.kit import Running

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"messages": ', "character 13"),
        (b"", "messages"),
        (b"[]", "body"),
    ],
)
def test_what_is_no_body(served: Running, data: bytes, words: str) -> None:
    answer = served.client.post("/v1/chat/completions", content=data, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"] or data in (b"", b"[]"), error


def test_half_a_character_is_no_fault(served: Running) -> None:
    body = rb'{"messages": [{"role": "user", "content": "kettle \ud83d"}], "stop": ["\udc00"]}'
    answer = served.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code in (200, 400), answer.text


def call(id: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


USER = {"role": "user", "content": "the kettle"}


@pytest.mark.parametrize("before", [[USER], [USER, call("other")]])
def test_a_result_nobody_asked_for(served: Running, before: list[dict[str, Any]]) -> None:
    chat = {"messages": [*before, {"role": "tool", "tool_call_id": "lost-7", "content": "x"}]}
    items: list[dict[str, Any]] = [USER]
    blocks: list[dict[str, Any]] = [USER]
    if len(before) > 1:
        made = {"type": "function_call", "call_id": "other", "name": "look", "arguments": "{}"}
        items.append(made)
        use = {"type": "tool_use", "id": "other", "name": "look", "input": {}}
        blocks.append({"role": "assistant", "content": [use]})
    items.append({"type": "function_call_output", "call_id": "lost-7", "output": "x"})
    result = {"type": "tool_result", "tool_use_id": "lost-7", "content": "x"}
    blocks.append({"role": "user", "content": [result]})
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": items}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 5}),
    ):
        answer = served.post(path, body)
        assert answer.status_code == 400, path
        assert "lost-7" in answer.json()["error"]["message"], path


def test_a_result_without_an_id_belongs_to_the_last_call(served: Running) -> None:
    messages = [USER, call("c"), {"role": "tool", "content": "the kettle"}]
    assert served.post("/v1/chat/completions", {"messages": messages}).status_code == 200
