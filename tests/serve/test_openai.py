"""The OpenAI routes over a scripted engine; expectations come from the script and from the API's
own documents. Cases C24, C28 to C33, C39 where they concern these routes."""

from __future__ import annotations

import json
import logging
import math

import pytest

from tests.serve.kit import NAME, Running, content, messages

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def test_c28_stop_text_over_tokens(served: Running) -> None:
    """'en ' inside 'seven ' is no match; the same text streamed, whole, and as a completion."""
    body = {**messages("the kettle"), "stop": ["en kettles"]}
    whole = served.post(CHAT, body).json()["choices"][0]
    assert whole["message"]["content"] == "seven gre"
    assert whole["finish_reason"] == "stop"
    chunks = served.chunks(CHAT, body)
    assert content(chunks) == "seven gre"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    plain = {"prompt": "the kettle", "stop": "en kettles", "max_tokens": 50}
    answer = served.post(COMPLETIONS, plain).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("seven gre", "stop")
    texts = [c["choices"][0]["text"] for c in served.chunks(COMPLETIONS, plain)]
    assert "".join(texts) == "seven gre"


@pytest.mark.parametrize("n_tokens", [2, 3, 4])
def test_c27_characters_split_over_tokens(served: Running, n_tokens: int) -> None:
    body = messages(f"emoji {n_tokens}")
    chunks = served.chunks(CHAT, body)
    assert content(chunks) == served.text(f"emoji {n_tokens}") == "a\N{GRINNING FACE}b"
    for chunk in chunks:
        assert "\ufffd" not in (chunk["choices"][0]["delta"].get("content") or "")


def test_c27_bytes_that_are_no_text_come_out_the_same_in_both_modes(served: Running) -> None:
    for more, expected in (({}, "a\ufffdb\ufffdc"), ({"max_tokens": 4}, "a\ufffdb\ufffd")):
        assert served.text("not text", **more) == expected
        assert content(served.chunks(CHAT, {**messages("not text"), **more})) == expected


def test_c24_prompt_longer_than_the_context(served: Running) -> None:
    """400 before any stream data, both counts, nothing generated, the next request served."""
    before = served.metric("vllm:request_success_total")
    for body in ({}, {"stream": True}):
        response = served.post(COMPLETIONS, {"prompt": "x" * 3001, **body})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "3001" in error["message"] and "3000" in error["message"]
        chat = served.post(CHAT, {**messages("x" * 3001), **body})
        assert chat.json()["error"]["code"] == "context_length_exceeded"
    assert served.metric("vllm:request_success_total") == before
    assert served.text("the kettle") == "seven green kettles boil"


def test_a_prompt_that_fills_the_context_gets_one_token(served: Running) -> None:
    answer = served.post(COMPLETIONS, {"prompt": "x" * 3000, "max_tokens": 9}).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_c29_usage_in_streams(served: Running) -> None:
    body = {**messages("the kettle"), "max_tokens": 6, "reasoning_effort": "high"}
    whole = served.post(CHAT, body).json()["usage"]
    chunks = served.chunks(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
    assert whole["completion_tokens_details"]["reasoning_tokens"] == 6
    assert whole["prompt_tokens_details"]["cached_tokens"] == 0
    assert whole["completion_tokens"] == 6
    assert all("usage" not in c for c in chunks[:-1])
    assert all("usage" not in c for c in served.chunks(CHAT, body))


def test_c30_two_calls(served: Running) -> None:
    body = {**messages("two calls"), "tools": TOOLS}
    choice = served.post(CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"at": "a"}, {"at": "b"}]
    assert len({c["id"] for c in calls}) == 2
    chunks = served.chunks(CHAT, body)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    seen: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if call["index"] not in seen:
                seen[call["index"]] = {"id": call["id"], "name": call["function"]["name"], "a": ""}
            else:
                assert "id" not in call and "name" not in call["function"]
            seen[call["index"]]["a"] += call["function"]["arguments"]
    assert list(seen) == [0, 1] and seen[0]["id"] != seen[1]["id"]
    assert [json.loads(c["a"]) for c in seen.values()] == [{"at": "a"}, {"at": "b"}]


def test_c31_broken_call_in_the_history(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": '}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
        {"role": "user", "content": "the kettle"},
    ]
    with caplog.at_level(logging.WARNING, "strata"):
        response = served.post(CHAT, {"messages": history})
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "seven green kettles boil"
    assert len([r for r in caplog.records if "argument" in r.getMessage()]) == 1
    spelled = served.post("/tokenize", {"messages": history, "with_pieces": True}).json()
    assert '{"a": ' in "".join(spelled["pieces"])


def test_c32_where_thinking_ends(served: Running) -> None:
    def ask(text: str, effort: str | None, **more: object) -> dict:
        body = {**messages(text), **({"reasoning_effort": effort} if effort else {}), **more}
        choice = served.post(CHAT, body).json()
        streamed = served.chunks(CHAT, body)
        message = choice["choices"][0]["message"]
        assert content(streamed) == (message["content"] or "")
        assert content(streamed, "reasoning_content") == message.get("reasoning_content", "")
        return choice

    call = ask("unclosed call", "high", tools=TOOLS)["choices"][0]  # (a)
    assert call["finish_reason"] == "tool_calls"
    assert call["message"]["tool_calls"][0]["function"]["name"] == "look"
    closed = ask("the kettle", "none")["choices"][0]["message"]  # (b)
    assert closed["content"] == "seven green kettles boil" and "reasoning_content" not in closed
    opened = ask("nothing but thought", "high")["choices"][0]["message"]  # (c)
    assert (opened["reasoning_content"].strip(), opened["content"]) == ("hm hm", "out")
    cut = ask("nothing but thought", "high", max_tokens=2)  # (d)
    choice = cut["choices"][0]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    spelled = ask("spelled tag", "high")["choices"][0]["message"]  # (e)
    assert spelled["content"] == "say </think> again"


def test_c33_a_schema_that_cannot_be_enforced(served: Running) -> None:
    def with_schema(schema: dict) -> dict:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {**messages("the kettle"), "response_format": form, "max_tokens": 200}

    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}
    for body in ({}, {"stream": True}):
        response = served.post(CHAT, {**with_schema(bad), **body})
        assert response.status_code == 400
        assert "pattern" in response.text and "properties" in response.text
    unknown = {"type": "object", "properties": {"b": {"type": "string", "contentMediaType": "x"}}}
    refused = served.post(CHAT, with_schema({**unknown, "dependentSchemas": {"a": {}}}))
    assert refused.status_code == 400 and "dependentSchemas" in refused.text
    good = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for seed in range(50):
        body = {**with_schema(good), "temperature": 30.0, "seed": seed}
        choice = served.post(CHAT, body).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["a"] in ("x", "y")
        else:
            assert choice["finish_reason"] == "length"


def test_c39_model_names(served: Running) -> None:
    response = served.post(CHAT, {**messages("hi"), "model": "ghost-7b"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found" and NAME in error["message"]
    for listed in served.get("/v1/models").json()["data"]:
        one = served.get(f"/v1/models/{listed['id']}").json()
        assert one == listed and one["context_length"] == 3000 and one["type"] == "chat"
    assert served.get("/v1/models/ghost-7b").status_code == 404


def test_n_answers_and_seeds(served: Running) -> None:
    body = {**messages("x y"), "n": 3, "temperature": 50.0, "seed": 5, "max_tokens": 8}
    first = served.post(CHAT, body).json()
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    texts = [c["message"]["content"] for c in first["choices"]]
    assert len(set(texts)) == 3
    assert [c["message"]["content"] for c in served.post(CHAT, body).json()["choices"]] == texts
    assert first["usage"]["completion_tokens"] <= 24
    streamed = served.chunks(CHAT, body)
    parts = ["".join(c["choices"][0]["delta"].get("content") or "" for c in streamed
                     if c["choices"][0]["index"] == i) for i in range(3)]  # fmt: skip
    assert parts == texts


def test_logprobs_of_a_chat(served: Running) -> None:
    body = {**messages("the kettle"), "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    rows = served.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [r["token"] for r in rows] == ["s", "e", "v"]
    assert all(r["logprob"] > -0.01 and len(r["top_logprobs"]) == 2 for r in rows)
    assert all(r["top_logprobs"][0]["token"] == r["token"] for r in rows)
    streamed = served.chunks(CHAT, body)
    got = [r for c in streamed for r in (c["choices"][0]["logprobs"] or {}).get("content", ())]
    assert got == rows


def test_echo_and_logprobs_of_the_prompt(served: Running) -> None:
    """As evaluation harnesses ask: one row a prompt token, the first without a value; here every
    token is as likely as any other."""
    body = {"prompt": "kettle", "max_tokens": 1, "echo": True, "logprobs": 1}
    response = served.post(COMPLETIONS, body).json()
    choice = response["choices"][0]
    assert choice["text"] == "kettles"
    rows = choice["logprobs"]
    assert rows["tokens"] == [*"kettle", "s"]
    assert rows["text_offset"] == list(range(7))
    n_vocab = served.status["model"]["vocabulary"]
    assert rows["token_logprobs"][0] is None
    assert rows["token_logprobs"][1:6] == pytest.approx([-math.log(n_vocab)] * 5)
    only = served.post(COMPLETIONS, {**body, "max_tokens": 0}).json()["choices"][0]
    assert only["text"] == "kettle" and len(only["logprobs"]["tokens"]) == 6


def test_prompts_in_every_form(served: Running) -> None:
    ids = served.post("/tokenize", {"prompt": "the kettle"}).json()["tokens"]
    assert ids == list(b"the kettle")
    back = served.post("/detokenize", {"tokens": ids}).json()
    assert back == {"prompt": "the kettle", "content": "the kettle"}
    for prompt, n in (["a kettle", "b kettle"], 2), ([ids, ids], 2), (ids, 1), ("a kettle", 1):
        choices = served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 30}).json()["choices"]
        assert [c["text"] for c in choices] == ["seven green kettles boil"] * n


def test_logit_bias_decides(served: Running) -> None:
    body = {**messages("the kettle"), "max_tokens": 3, "logit_bias": {str(ord("z")): 100}}
    assert served.post(CHAT, body).json()["choices"][0]["message"]["content"] == "zzz"


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("temperature", "warm", "temperature"),
        ("temperature", -1, "temperature"),
        ("n", 1000, "n"),
        ("messages", [], "messages"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {
            "url": "file:///etc/passwd"}}]}], "image_url"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokenz", 5, "did you mean 'max_tokens'"),
        ("functions", [{"name": "f"}], "functions"),
        ("response_format", {"type": "xml"}, "response_format"),
        ("tool_choice", "required", "tool"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("stop", [""], "empty"),
        ("chat_template_kwargs", {"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(
    served: Running, field: str, value: object, word: str
) -> None:
    response = served.post(CHAT, {**messages("hi"), field: value})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert word in message and "\n" not in message and "Traceback" not in message


def test_fields_without_effect_are_named(served: Running) -> None:
    body = {**messages("the kettle"), "user": "me", "brand_new": 1, "metadata": {}}
    response = served.post(CHAT, body)
    warnings = response.json()["warnings"]
    assert warnings == ["user has no effect here", "brand_new is not known here and has no effect"]
    assert "brand_new" in response.headers["x-strata-warnings"]
    assert served.chunks(CHAT, body)[-1]["warnings"] == warnings
    assert "warnings" not in served.chat("the kettle")


def test_c18_a_broken_number_ends_one_request(served: Running) -> None:
    response = served.post(CHAT, messages("nan now"))
    assert response.status_code == 500 and "logits" in response.json()["error"]["message"]
    streamed = served.post(CHAT, {**messages("error now"), "stream": True}).text
    assert "the script says so" in streamed and streamed.endswith("data: [DONE]\n\n")
    assert served.text("the kettle") == "seven green kettles boil"


def test_c11_a_template_that_refuses(served: Running) -> None:
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    for more in ({}, {"stream": True}):
        response = served.post(CHAT, {"messages": late, **more})
        assert response.status_code == 400
        assert "System message must be at the beginning." in response.json()["error"]["message"]
    assert served.text("the kettle") == "seven green kettles boil"
    assert served.post(COMPLETIONS, {"prompt": "kettle"}).status_code == 200


def test_c09_c10_control_tokens(served: Running) -> None:
    """One id for each control token that the template wrote; spelled ones are bytes. C09, C10."""
    said = {"role": "user", "content": "note<|role|>book<|end|>"}
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    tool = {"role": "tool", "tool_call_id": "c", "content": "<|end|><|assistant|>"}
    body = {"messages": [said, call, tool]}
    ids = served.post("/tokenize", body).json()["tokens"]
    control = [i for i in ids if 256 <= i < 256 + 7]
    assert len(control) == 7  # user, end, assistant, end, tool, end, assistant
    spelled = bytes(i for i in ids if i < 256)
    assert spelled == f"{said['content']}<tool_call>{{}}{tool['content']}".encode()
