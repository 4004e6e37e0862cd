"""Errors name the field as the client wrote it, on every route. Findings of a test by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.kit import Running, messages

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**messages("hi"), "stop": 5}, "stop"),
        (CHAT, {**messages("hi"), "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        (CHAT, {**messages("hi"), "logit_bias": {"99999": 1}}, "logit_bias"),
        (CHAT, {**messages("hi"), "logit_bias": {"1": 1e9}}, "logit_bias"),
        (CHAT, {**messages("hi"), "guided_regex": "("}, "guided_regex"),
        (CHAT, messages("x" * 4000), "messages"),
        (CHAT, {}, "messages"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [99999]}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 4000}, "prompt"),
        (RESPONSES, {"input": "x" * 4000}, "input"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens.1"),
    ],
)  # fmt: skip
def test_the_right_field(served: Running, path: str, body: dict[str, Any], param: str) -> None:
    response = served.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert not error["message"].startswith("--")


def test_bodies_that_are_no_json(served: Running) -> None:
    """Broken JSON, and JSON sent as what it is not (curl -d without a header)."""
    broken = served.client.post(
        CHAT, content=b'{"a": ', headers={"content-type": "application/json"}
    )
    error = broken.json()["error"]
    assert broken.status_code == 400 and error["param"] is None and "no JSON" in error["message"]
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = served.client.post(CHAT, content=b"{}", headers={"content-type": kind})
        assert response.status_code == 400
        assert "Content-Type: application/json" in response.json()["error"]["message"]
    assert "object" in served.post(CHAT, [1]).json()["error"]["message"]
