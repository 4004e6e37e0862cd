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


def test_counts_of_several_answers_agree_with_the_usage(served: Running) -> None:
    """C41 for n > 1: a prompt that is answered twice is one prompt in both."""
    names = {"vllm:prompt_tokens_total": "prompt_tokens",
             "vllm:generation_tokens_total": "completion_tokens"}  # fmt: skip
    before = {name: served.metric(name) for name in names}
    body = {"prompt": ["a kettle", "b kettle"], "n": 2, "max_tokens": 3}
    usage = served.post(COMPLETIONS, body).json()["usage"]
    assert usage["prompt_tokens"] == 16
    for name, field in names.items():
        assert served.metric(name) - before[name] == usage[field]


def test_stream_options_without_a_stream_are_named(served: Running) -> None:
    body = {**messages("the kettle"), "stream_options": {"include_usage": True}}
    assert served.post(CHAT, body).json()["warnings"] == [
        "stream_options has no effect without stream"
    ]
    assert "warnings" not in served.chunks(CHAT, body)[-1]
    empty = served.post(COMPLETIONS, {"prompt": "the kettle", "stop": ""}).json()
    assert "stop" in empty["warnings"][0]


def test_a_text_far_beyond_the_context_is_not_cut_to_its_end(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C24, as fast for a text of a hundred contexts as for one of two: a token a character here."""
    tokenizer, cut = served.server.text.tokens, []
    encode = type(tokenizer).encode

    def counted(self: Any, text: str, **more: Any) -> list[int]:
        cut.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    for path, body in (
        (CHAT, messages("x" * 300_000)),
        (COMPLETIONS, {"prompt": "x" * 300_000}),
        (RESPONSES, {"input": "x" * 300_000}),
    ):
        cut.clear()
        error = served.post(path, body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "3000" in error["message"]
        assert "has more than 65536 tokens" in error["message"]
        assert 6000 < sum(cut) <= 1 << 16
