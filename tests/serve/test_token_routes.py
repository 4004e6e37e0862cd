"""/tokenize and /detokenize in the forms of vLLM and of llama.cpp, as their documents have them;
the prompt of a conversation is the one that chat reads."""

from __future__ import annotations

from tests.serve.kit import Running, messages

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
]


def test_the_form_of_llama_cpp(served: Running) -> None:
    plain = served.post("/tokenize", {"content": "a<|end|>"}).json()
    assert plain["tokens"] == [97, 256]
    spelled = served.post("/tokenize", {"content": "a<|end|>", "parse_special": False}).json()
    assert spelled["tokens"] == list(b"a<|end|>")
    pieces = served.post("/tokenize", {"content": "ab", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    assert served.post("/detokenize", {"tokens": [97, 98]}).json()["content"] == "ab"


def test_token_strings_of_vllm(served: Running) -> None:
    body = {"prompt": "ab", "return_token_strs": True}
    assert served.post("/tokenize", body).json()["token_strs"] == ["a", "b"]


def test_a_conversation_counts_as_chat_reads_it(served: Running) -> None:
    counted = served.post("/tokenize", {"messages": HISTORY}).json()["count"]
    used = served.post("/v1/chat/completions", {"messages": HISTORY, "max_tokens": 1}).json()
    assert counted == used["usage"]["prompt_tokens"]


def test_one_text_and_no_silence(served: Running) -> None:
    for body in ({}, {"prompt": "a", "content": "a"}, {**messages("a"), "prompt": "a"}):
        error = served.post("/tokenize", body)
        assert error.status_code == 400
        assert "prompt, content and messages" in error.json()["error"]["message"]
    for path, body in ("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [97]}):
        response = served.post(path, {**body, "brand_new": 1})
        assert response.json()["warnings"] == ["brand_new is not known here and has no effect"]
        assert "brand_new" in response.headers["x-strata-warnings"]
        assert "warnings" not in served.post(path, body).json()
    taken = {**messages("a"), "chat_template_kwargs": {"messages": []}}
    assert served.post("/tokenize", taken).status_code == 400
