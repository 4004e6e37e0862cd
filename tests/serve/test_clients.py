"""The official client libraries against the scripted server, and the two newer APIs by hand.

What a client rebuilds from a stream must be what it gets at once. Cases C29, C30 and C32 with the
clients people use.
"""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from tests.serve.kit import NAME, Running, messages

KETTLE = "seven green kettles boil"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
CLAUDE_TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def gpt(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def claude(served: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30)


def test_openai_chat(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(model=NAME, **messages("the kettle"))
    assert whole.choices[0].message.content == KETTLE
    parts = gpt.chat.completions.create(
        model=NAME, **messages("the kettle"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(parts)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == KETTLE
    assert chunks[-1].usage == whole.usage


def test_c30_openai_rebuilds_the_same_calls(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(model=NAME, **messages("two calls"), tools=TOOLS)
    with gpt.chat.completions.stream(model=NAME, **messages("two calls"), tools=TOOLS) as stream:
        rebuilt = stream.get_final_completion()
    for answer in (whole, rebuilt):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
            ("look", {"at": "a"}),
            ("look", {"at": "b"}),
        ]


def test_openai_errors(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="ghost-7b"):
        gpt.chat.completions.create(model="ghost-7b", **messages("hi"))
    with pytest.raises(openai.BadRequestError, match="3000"):
        gpt.chat.completions.create(model=NAME, **messages("x" * 4000))
    with pytest.raises(openai.APIError, match="the script says so"):
        list(gpt.chat.completions.create(model=NAME, **messages("error now"), stream=True))
    assert [m.id for m in gpt.models.list()] == [NAME]


def test_openai_completions(gpt: openai.OpenAI) -> None:
    whole = gpt.completions.create(model=NAME, prompt="kettle", max_tokens=50, logprobs=1)
    parts = gpt.completions.create(
        model=NAME, prompt="kettle", max_tokens=50, logprobs=1, stream=True
    )
    chunks = list(parts)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text == KETTLE
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.tokens


def test_openai_responses(gpt: openai.OpenAI) -> None:
    whole = gpt.responses.create(model=NAME, input="the kettle")
    assert (whole.output_text, whole.status) == (KETTLE, "completed")
    with gpt.responses.stream(model=NAME, input="the kettle") as stream:
        rebuilt = stream.get_final_response()
    assert rebuilt.output_text == KETTLE and rebuilt.usage == whole.usage
    cut = gpt.responses.create(model=NAME, input="the kettle", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.output_text == "se"
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    calls = gpt.responses.create(model=NAME, input="two calls", tools=tools).output
    with gpt.responses.stream(model=NAME, input="two calls", tools=tools) as stream:
        streamed = stream.get_final_response().output
    for output in (calls, streamed):
        found = [item for item in output if item.type == "function_call"]
        assert [json.loads(c.arguments) for c in found] == [{"at": "a"}, {"at": "b"}]
    thought = gpt.responses.create(
        model=NAME, input="nothing but thought", reasoning={"effort": "high"}
    )
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        gpt.responses.create(model=NAME, input="hi", previous_response_id="resp_1")


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    body = {"model": NAME, "max_tokens": 100, **messages("the kettle")}
    whole = claude.messages.create(**body)
    assert whole.content[0].text == KETTLE and whole.stop_reason == "end_turn"
    with claude.messages.stream(**body) as stream:
        rebuilt = stream.get_final_message()
    assert rebuilt.content[0].text == KETTLE and rebuilt.stop_reason == "end_turn"
    assert rebuilt.usage.output_tokens == whole.usage.output_tokens == 10
    stopped = claude.messages.create(**body, stop_sequences=["zz", "en kettles"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("seven gre", "stop_sequence")
    assert stopped.stop_sequence == "en kettles"
    cut = claude.messages.create(**{**body, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"


def test_anthropic_tools_and_thinking(claude: anthropic.Anthropic) -> None:
    body = {"model": NAME, "max_tokens": 200, **messages("two calls"), "tools": CLAUDE_TOOLS}
    with claude.messages.stream(**body) as stream:
        rebuilt = stream.get_final_message()
    for message in (claude.messages.create(**body), rebuilt):
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [c.input for c in calls] == [{"at": "a"}, {"at": "b"}]
        assert message.stop_reason == "tool_use"
    thinking = {"type": "enabled", "budget_tokens": 2000}
    body = {"model": NAME, "max_tokens": 2100, **messages("nothing but thought")}
    thought = claude.messages.create(**body, thinking=thinking)
    assert [block.type for block in thought.content] == ["thinking", "text"]


def test_anthropic_cut_calls_are_the_same_in_both_modes(claude: anthropic.Anthropic) -> None:
    """The input of a call that max_tokens cut is what the official client makes of the stream."""
    for limit, arguments in ((1, {"n": 1}), (2, {"n": 1}), (3, {"n": 1, "at": "Rome\n</p"})):
        body = {"model": NAME, **messages("cut call"), "max_tokens": limit, "tools": CLAUDE_TOOLS}
        with claude.messages.stream(**body) as stream:
            rebuilt = stream.get_final_message()
        for message in (claude.messages.create(**body), rebuilt):
            assert message.content[0].input == arguments
            assert message.stop_reason == "max_tokens"


def test_responses_cut_calls_are_incomplete_in_both_modes(gpt: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    begin = '{"n": 1, "at'
    for limit, said in ((1, begin), (2, f'{begin}": "Ro')):
        body = {"model": NAME, "input": "cut call", "max_output_tokens": limit, "tools": tools}
        events = list(gpt.responses.create(**body, stream=True))
        [done] = [e.item for e in events if e.type == "response.output_item.done"]
        assert events[-1].type == "response.incomplete"
        for call in (gpt.responses.create(**body).output[0], events[-1].response.output[0], done):
            assert (call.arguments, call.status) == (said, "incomplete")
    cut = gpt.responses.create(model=NAME, input="the kettle", max_output_tokens=2)
    assert cut.output[0].status == "incomplete"
    at_end = gpt.responses.create(**{**body, "max_output_tokens": 3})
    assert (at_end.output[0].status, at_end.status) == ("completed", "incomplete")


def test_anthropic_counts_and_errors(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=NAME, **messages("the kettle"))
    used = claude.messages.create(model=NAME, max_tokens=1, **messages("the kettle"))
    raw = claude.messages.with_raw_response.count_tokens(
        model=NAME, **messages("the kettle"), tools=CLAUDE_TOOLS
    )
    assert "no place for tools" in raw.headers["x-strata-warnings"]
    assert counted.input_tokens == used.usage.input_tokens == len("the kettle") + 3
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="ghost-7b", max_tokens=1, **messages("hi"))
    image = [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(
            model=NAME, max_tokens=1, messages=[{"role": "user", "content": image}]
        )
