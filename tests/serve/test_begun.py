"""Answers that the client has begun. Expectations from the APIs' documents (Anthropic's prefill,
vLLM's continue_final_message) and from the scripted template, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from strata.core.errors import TemplateError
from strata.formats.chat_template import ChatTemplate
from strata.serve.begun import HARMONY_BEGUN, begun_tail
from strata.serve.text.parsers import parser_for
from tests.serve.kit import Running
from tests.serve.text.kit import HINTS, fold

CHAT, CLAUDE = "/v1/chat/completions", "/v1/messages"
USER = {"role": "user", "content": "the kettle"}
BEGUN = {"role": "assistant", "content": "A file "}
BODY = {"messages": [USER, BEGUN], "max_tokens": 50}
SPELLED = "<|user|>the kettle<|end|><|assistant|>"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }}<end>{% endfor %}"
)


def prompt(served: Running, **more: Any) -> str:
    """What chat reads, as text."""
    body = {"messages": BODY["messages"], "with_pieces": True, **more}
    return "".join(served.post("/tokenize", body).json()["pieces"])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, "<user>hi</user><assistant>A file "),
        (THINKS, "<user>hi<end><assistant><think>\n\n</think>\n\nA file "),
    ],
)
def test_a_prompt_ends_where_the_last_message_does(template: str, expected: str) -> None:
    """Its own white space stays; what the template prints before an answer stands before it."""
    made = ChatTemplate(template)
    for content in ("A file ", [{"type": "text", "text": "A file "}]):
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        assert made.render(said, continue_final=True) == expected


def test_a_template_that_prints_no_last_message_is_refused() -> None:
    hides = "{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(TemplateError, match="cannot be continued"):
        ChatTemplate(hides).render([USER, BEGUN], continue_final=True)


def test_every_api_goes_on(served: Running) -> None:
    """The prompt ends with what was begun, and the answer is what comes after it."""
    assert prompt(served) == f"{SPELLED}A file "
    n = len("the kettle") + 3 + len("A file ")
    chat = served.post(CHAT, BODY).json()
    claude = served.post(CLAUDE, BODY).json()
    counted = served.post(f"{CLAUDE}/count_tokens", {"messages": BODY["messages"]}).json()
    assert chat["usage"]["prompt_tokens"] == claude["usage"]["input_tokens"] == n
    assert counted["input_tokens"] == n
    assert chat["choices"][0]["message"]["content"] == "seven green kettles boil"
    assert claude["content"][0]["text"] == "seven green kettles boil"
    assert "warnings" not in chat and "warnings" not in claude
    items = [{"role": m["role"], "content": m["content"]} for m in BODY["messages"]]
    responses = served.post("/v1/responses", {"input": items}).json()
    assert responses["usage"]["input_tokens"] == n


def test_a_new_answer_where_that_is_asked_for(served: Running) -> None:
    new = {**BODY, "continue_final_message": False}
    spelled = f"{SPELLED}A file <|end|><|assistant|>"
    assert prompt(served, continue_final_message=False) == spelled
    n = len("the kettle") + 3 + len("A file ") + 2
    assert served.post(CHAT, new).json()["usage"]["prompt_tokens"] == n
    empty = {"messages": [USER, {"role": "assistant", "content": ""}]}
    assert served.post(CHAT, empty).json()["usage"]["prompt_tokens"] == len("the kettle") + 3
    vllm = {**BODY, "continue_final_message": True, "add_generation_prompt": False}
    assert served.post(CHAT, vllm).json()["usage"]["prompt_tokens"] == n - 2


def test_what_cannot_be_gone_on_from(served: Running) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    for more, field in (
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [tool], "tool_choice": "required"}, "tool_choice"),
    ):
        error = served.post(CHAT, {**BODY, **more})
        assert error.status_code == 400 and error.json()["error"]["param"] == field, error.text


@pytest.mark.parametrize(
    ("form", "begun", "written", "content", "reasoning"),
    [
        ("json", "List:", "\n- a", "\n- a", ""),
        ("json", "<think>\nLet me", " see</think>\n\nYes", "Yes", " see"),
        ("json", "<think>\nI see</think>\n\nYe", "s", "s", ""),
        ("harmony", "A file", " is", " is", ""),
    ],
)
def test_where_the_answer_goes_on(
    form: str, begun: str, written: str, content: str, reasoning: str
) -> None:
    """In the content, or inside thinking when the begun text opens it."""
    family, hint = HINTS[form]
    tail = begun_tail(family, hint, begun)
    parser = parser_for(family, hint, (), reasoning=True, prompt_tail=tail)
    answer = fold([*parser.feed(written), *parser.finish()])
    assert (answer.content, answer.reasoning) == (content, reasoning)
    assert (tail == HARMONY_BEGUN) == (form == "harmony")
