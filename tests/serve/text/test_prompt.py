"""Client messages to template input. Expectations by hand from the public API documents; templates
here are cut-down forms of what families ship."""

from __future__ import annotations

from typing import Any

import pytest

from strata.core.errors import InputError, TemplateError, UnsupportedError
from strata.formats.chat_template import ChatTemplate
from strata.serve.text.prompt import (
    ToolChoice,
    openai_messages,
    openai_tool_choice,
    openai_tools,
    template_tools,
)
from strata.serve.text.prompt_other import (
    anthropic_messages,
    anthropic_tool_choice,
    anthropic_tools,
    responses_messages,
)
from strata.serve.text.specs import ToolSpec
from strata.serve.text.template_style import (
    TemplateStyle,
    effort_variables,
    effort_warning,
    style_of,
    unread,
)

STYLE = TemplateStyle()
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for t in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ t.function.name }}", "arguments": '
    "{% if t.function.arguments is string %}{{ t.function.arguments }}"
    "{% else %}{{ t.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
CODER = HERMES.replace(
    "{% if t.function.arguments is string %}{{ t.function.arguments }}"
    "{% else %}{{ t.function.arguments | tojson }}{% endif %}",
    "{% for k, v in t.function.arguments | items %}<parameter={{ k }}>{{ v }}{% endfor %}",
)
FENCED = HERMES.replace(
    "{% if t.function.arguments is string %}{{ t.function.arguments }}"
    "{% else %}{{ t.function.arguments | tojson }}{% endif %}",
    "{{ '```' + t.function.arguments + '```' }}",
)
ALWAYS_JSON = HERMES.replace(
    "{% if t.function.arguments is string %}{{ t.function.arguments }}"
    "{% else %}{{ t.function.arguments | tojson }}{% endif %}",
    "{{ t.function.arguments | tojson }}",
)


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


def call(arguments: Any, id: str = "c1", name: str = "ls") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("template", "as_object", "as_text"),
    [(HERMES, True, True), (CODER, True, False), (FENCED, False, True), (ALWAYS_JSON, True, True)],
)
def test_style_of_arguments(template: str, as_object: bool, as_text: bool) -> None:
    style = style_of(template)
    assert (style.object_arguments, style.text_arguments) == (as_object, as_text)


@pytest.mark.parametrize("template", [HERMES, CODER, FENCED, ALWAYS_JSON])
def test_c31_broken_call_in_the_history(template: str) -> None:
    messages = [
        {"role": "user", "content": "list"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": ')]},
        {"role": "tool", "tool_call_id": "c1", "content": "no such"},
    ]
    made = openai_messages(messages, style_of(template))
    assert len(made.warnings) == 1 and "tool call 0 of message 1" in made.warnings[0]
    text = ChatTemplate(template).render(made.messages)
    assert '{"a": ' in text.replace('\\"', '"') and "no such" in text


@pytest.mark.parametrize(
    ("template", "printed"),
    [(HERMES, '"arguments": {"a": 1}'), (CODER, "<parameter=a>1"), (FENCED, '```{"a": 1}```')],
)
def test_good_calls_are_printed_plainly(template: str, printed: str) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [call('{"a":1}')]}]
    made = openai_messages(messages, style_of(template))
    assert not made.warnings and printed in ChatTemplate(template).render(made.messages)


def test_openai_roles_parts_and_names() -> None:
    made = openai_messages(
        [
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": [part("and kind")]},
            {"role": "user", "content": [part("a"), part("b")]},
            {"role": "assistant", "content": "hm", "reasoning_content": "why",
             "tool_calls": [call("")]},
            {"role": "tool", "tool_call_id": "c1", "content": [part("out")]},
        ],
        STYLE,
    )  # fmt: skip
    assert made.messages == [
        {"role": "system", "content": "be brief\n\nand kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "hm", "reasoning_content": "why",
         "tool_calls": [call({})]},
        {"role": "tool", "content": "out", "tool_call_id": "c1", "name": "ls"},
    ]  # fmt: skip


def test_developer_and_thinking_where_the_template_knows_them() -> None:
    source = "{% if m.role == 'developer' %}{% endif %}{{ m.thinking }}{{ reasoning_effort }}"
    style = style_of(source)
    assert style.developer and style.thinking_key == "thinking"
    made = openai_messages(
        [
            {"role": "developer", "content": "x"},
            {"role": "assistant", "content": "y", "reasoning": "z"},
        ],
        style,
    )
    assert made.messages[0]["role"] == "developer" and made.messages[1]["thinking"] == "z"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "user"}, "no content"),
        ({"role": "robot", "content": "x"}, "'robot'"),
        ({"content": "x"}, "a role"),
        ({"role": "user", "content": 5}, "text or a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool call 0"),
        ({"role": "assistant", "tool_calls": [call("{}", name="")]}, "no name"),
    ],
)
def test_refused_with_one_line_that_names_the_place(message: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        openai_messages([{"role": "user", "content": "ok"}, message], STYLE)
    assert "message 1" in str(caught.value) and "\n" not in str(caught.value)


def test_anthropic_blocks_in_order() -> None:
    made = anthropic_messages(
        [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        [
            {"role": "user", "content": "list"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"},
                part("I look."),
                {"type": "tool_use", "id": "c1", "name": "ls", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "pwd", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [part("x")]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "gone", "is_error": True},
                part("and now?"),
            ]},
        ],
        STYLE,
    )  # fmt: skip
    assert made.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "list"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "why",
         "tool_calls": [call({"a": 1}), call({}, "c2", "pwd")]},
        {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "ls"},
        {"role": "tool", "content": "error: gone", "tool_call_id": "c2", "name": "pwd"},
        {"role": "user", "content": "and now?"},
    ]  # fmt: skip


def test_anthropic_images_and_server_tools_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="message 0 has a part of type 'image'"):
        anthropic_messages(None, [{"role": "user", "content": [{"type": "image"}]}], STYLE)
    with pytest.raises(UnsupportedError, match="web_search_20250305"):
        anthropic_tools([{"type": "web_search_20250305", "name": "web_search"}])


def test_responses_items_of_one_answer_are_one_message() -> None:
    made = responses_messages(
        "be brief",
        [
            {"role": "user", "content": [part("list", "input_text")]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]},
            {"type": "message", "role": "assistant", "content": [part("ok", "output_text")]},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
        ],
        STYLE,
    )  # fmt: skip
    assert made.messages[2:] == [
        {"role": "assistant", "content": "ok", "reasoning_content": "why",
         "tool_calls": [call({"a": 1})]},
        {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "ls"},
    ]  # fmt: skip
    assert responses_messages(None, "hi", STYLE).messages == [{"role": "user", "content": "hi"}]


def test_tools_of_every_api_are_one_thing() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    expected = [ToolSpec("ls", "lists", schema)]
    function = {"name": "ls", "description": "lists", "parameters": schema}
    assert openai_tools([{"type": "function", "function": function}]) == expected
    assert openai_tools([{"type": "function", **function}]) == expected
    assert (
        anthropic_tools([{"name": "ls", "description": "lists", "input_schema": schema}])
        == expected
    )
    shown = template_tools(expected, ToolChoice())
    assert shown == [{"type": "function", "function": function}]
    assert template_tools(expected, ToolChoice("none")) is None


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": "a", "parameters": 5}}],
        [{"type": "function", "function": {"name": "a"}}] * 2,
        [{"type": "code_interpreter"}],
    ],
)
def test_bad_tools(tools: Any) -> None:
    with pytest.raises(InputError):
        openai_tools(tools)


def test_tool_choice() -> None:
    tools = [ToolSpec("ls"), ToolSpec("pwd")]
    assert openai_tool_choice(None, tools, False) == ToolChoice("auto", None, False)
    assert openai_tool_choice("required", tools) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "pwd"}}
    assert openai_tool_choice(named, tools) == ToolChoice("required", "pwd", False)
    assert anthropic_tool_choice({"type": "any"}, tools) == ToolChoice("required")
    assert anthropic_tool_choice({"type": "tool", "name": "ls"}, tools).only == "ls"
    with pytest.raises(InputError, match="not among the tools: ls, pwd"):
        openai_tool_choice({"type": "function", "name": "rm"}, tools)
    with pytest.raises(InputError, match="no tools"):
        openai_tool_choice("required", [])
    with pytest.raises(InputError, match="'sometimes'"):
        anthropic_tool_choice({"type": "sometimes"}, tools)


@pytest.mark.parametrize(
    ("source", "effort", "variables"),
    [
        ("{% if enable_thinking is false %}x{% endif %}", "none", {"enable_thinking": False}),
        ("{{ reasoning_effort }}", "xhigh", {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{% if not thinking is defined %}{% endif %}", "high", {"thinking": True}),
        ("{{ messages }}", "high", {}),
    ],
)
def test_effort_goes_to_the_variables_the_template_reads(
    source: str, effort: Any, variables: dict[str, Any]
) -> None:
    assert effort_variables(style_of(source), effort) == variables


@pytest.mark.parametrize(
    ("source", "effort", "said"),
    [
        ("{{ messages }}", "low", "knows no effort"),
        ("{{ enable_thinking }}", "low", "no levels"),
        ("{{ enable_thinking }}", "none", None),
        ("{{ reasoning_effort }}", "low", None),
        ("{{ reasoning_effort }}", "none", "given to this model's template as low"),
        ("{{ reasoning_effort }}", "xhigh", "as high"),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", None),
    ],
)
def test_an_effort_that_the_template_cannot_ask_for_is_named(
    source: str, effort: Any, said: str | None
) -> None:
    warning = effort_warning(style_of(source), effort)
    assert warning is None if said is None else said in str(warning)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools %}{{ tools }}{% endif %}", []),
        ("{%- for t in tools %}{% generation %}{{ t }}{% endgeneration %}{% endfor %}", []),
        ("You have no tools. {# tools #}{{ 'tools' ~ m.tools }}", ["tools"]),
        ("{% if x == '", ["tools"]),
        ("{% if tools == '", []),
    ],
)
def test_variables_that_a_template_reads(source: str, expected: list[str]) -> None:
    assert unread(source, ["tools"]) == expected


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.tool_calls | string }}{% endfor %}", True),
        ("{{ raise_exception('no') }}", True),
    ],
)
def test_whether_earlier_calls_are_shown(source: str, shown: bool) -> None:
    assert style_of(source).calls is shown


def test_c11_a_late_system_message_is_the_templates_to_refuse() -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system first') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    turn = {"role": "user", "content": "hi"}
    late = openai_messages([turn, {"role": "system", "content": "x"}], style_of(strict))
    with pytest.raises(TemplateError, match="system first"):
        ChatTemplate(strict).render(late.messages)
