"""Calls and thinking of formats made of control tokens, through the official client, both ways.

Expectations: the answer is written by hand in the format's own tokens; the client must rebuild the
same message from the stream as from the answer at once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.kit import Running, running

PLAIN = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content or '' }}{% endfor %}"
ARGUMENTS = '{"path": "a/é.txt", "deep": true}'
# the scripted engine's own end token is spelled <|end|>, so messages end at the next <|start|>
HARMONY = [
    "<|channel|>", "analysis", "<|message|>", "I ", "look.",
    "<|start|>", "assistant", "<|channel|>", "commentary", "<|message|>", "A moment.",
    "<|start|>", "assistant", "<|channel|>", "commentary to=functions.look ", "<|constrain|>",
    "json", "<|message|>", ARGUMENTS[:11], ARGUMENTS[11:],
]  # fmt: skip
DEEPSEEK = [
    "<think>", "I ", "look.", "</think>", "A moment.", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "lo", "ok", "<｜tool▁sep｜>", ARGUMENTS[:11], ARGUMENTS[11:],
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
]  # fmt: skip
GLM = [
    "\n<think>", "I look.", "</think>\nA ", "moment.\n", "<tool_call>", "look\n", "<arg_key>path",
    "</arg_key>\n<arg_value>", "a/é", ".txt</arg_value>\n<arg_key>deep</arg_key>\n",
    "<arg_value>true</arg", "_value>\n</tool_call>",
]  # fmt: skip
FORMATS = {
    "gpt-oss": (HARMONY, "{{ '<|start|>assistant' }}{% if false %}<|channel|>{% endif %}"),
    "deepseek": (DEEPSEEK, "{% if false %}<｜tool▁calls▁begin｜>{% endif %}"),
    "glm": (GLM, "{% if false %}<arg_key>{% endif %}"),
}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "deep": {"type": "boolean"}},
}


@pytest.fixture(scope="module", params=FORMATS)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    written, tail = FORMATS[request.param]
    control = [piece for piece in written if piece[:2] in ("<|", "<｜")]
    script = {
        "template": PLAIN + tail,
        "control": list(dict.fromkeys(control)),
        "answers": [{"when": "go", "write": written}],
    }
    with running(tmp_path_factory.mktemp("formats"), script) as made:
        yield made


def test_c30_openai_client_rebuilds_the_same_message(server: Running) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    asked = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "go"}],
        "tools": [tool],
    }
    at_once = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        rebuilt = stream.get_final_completion()
    client.close()
    for answer in (at_once, rebuilt):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "A moment."
        assert choice.message.reasoning_content == "I look."
        [call] = choice.message.tool_calls
        assert call.id.startswith("call_") and call.function.name == "look"
        assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    assert at_once.usage.completion_tokens == rebuilt.usage.completion_tokens
    reasoning = [a.usage.completion_tokens_details.reasoning_tokens for a in (at_once, rebuilt)]
    assert reasoning[0] == reasoning[1] > 0


def test_anthropic_blocks(server: Running) -> None:
    body = {
        "model": "scripted",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "go"}],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
    }
    answer = server.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "tool_use"
    thinking, text, call = answer["content"]
    assert (thinking["thinking"], text["text"]) == ("I look.", "A moment.")
    assert (call["name"], call["input"]) == ("look", json.loads(ARGUMENTS))


def test_without_tools_thinking_is_still_split(server: Running) -> None:
    answer = server.chat("go")["choices"][0]
    assert answer["message"]["reasoning_content"] == "I look."
    assert answer["message"]["content"].startswith("A moment.")
    assert answer["finish_reason"] == "stop" and not answer["message"].get("tool_calls")
