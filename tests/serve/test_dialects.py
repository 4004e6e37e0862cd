"""Fields of other servers' clients: taken as ours, refused by name, or named as without effect; a
form that is asked for under any name is had or refused. Names and defaults are those of the
documents of llama.cpp's server, of vLLM and of SGLang; C33 where forms are concerned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.serve.dialects import FORMS, NEUTRAL, SYNONYMS, refuse
from strata.serve.errors import ApiError
from tests.serve.kit import Running, messages, running

CHAT, COMPLETIONS, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
KETTLE = "seven green kettles boil"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """A request of every route that answers."""
    return {
        CHAT: messages(text),
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
        CLAUDE: {**messages(text), "max_tokens": 50},
    }


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_json", SCHEMA, '{"a":"x"}'),
        ("guided_json", json.dumps(SCHEMA), '{"a":"x"}'),
        ("json_schema", SCHEMA, '{"a":"x"}'),
        ("guided_regex", "q{4}", "qqqq"),
        ("regex", "q{4}", "qqqq"),
        ("guided_choice", ["yes"], "yes"),
        ("guided_grammar", 'start: "ab" "c"', "abc"),
        ("grammar", 'root ::= "ab" tail\ntail ::= "c"', "abc"),
        ("ebnf", 'root ::= "ab" "c"', "abc"),
        ("structured_outputs", {"json": json.dumps(SCHEMA)}, '{"a":"x"}'),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, '{"a":"x"}'),
    ],
)
def test_c33_a_form_under_any_name_is_had(
    served: Running, field: str, value: object, pattern: str
) -> None:
    body = {**messages("hi"), "reasoning_effort": "none", field: value}
    chat = served.post(CHAT, body).json()
    plain = served.post(COMPLETIONS, {"prompt": "hi", field: value, "max_tokens": 200}).json()
    for text in (chat["choices"][0]["message"]["content"], plain["choices"][0]["text"]):
        assert "".join(text.split()) == pattern
    assert "warnings" not in chat


@pytest.mark.parametrize("field", [*FORMS, "response_format", "structured_outputs"])
def test_c33_no_route_drops_a_form(served: Running, field: str) -> None:
    """A value that is no form of any kind: 400 that names the field, on every route."""
    for path, body in bodies("the kettle").items():
        response = served.post(path, {**body, field: {"type": 7, "a": ["("]}})
        assert response.status_code == 400, (path, response.text)
        assert field in response.json()["error"]["message"] or path in (CHAT, COMPLETIONS)
        assert response.json()["error"].get("param", field) == field


def test_c33_two_forms_are_refused(served: Running) -> None:
    for more in ({"response_format": {"type": "json_object"}}, {"guided_choice": ["a"]}):
        response = served.post(CHAT, {**messages("hi"), "guided_regex": "a+", **more})
        assert response.status_code == 400 and "guided_regex" in response.text
    text = {"type": "text", "schema": SCHEMA}
    assert served.post(CHAT, {**messages("hi"), "response_format": text}).status_code == 400


@pytest.mark.parametrize("name", [name for names in SYNONYMS for name in names])
def test_other_names_of_our_fields(served: Running, name: str) -> None:
    """Every name of a length, a stop text or a penalty means the same on every route."""
    values = [5, ["en"], 50.0]
    kind = next(i for i, names in enumerate(SYNONYMS) if name in names)
    for path, body in bodies("the kettle").items():
        if path == RESPONSES and kind == 1 or path == CLAUDE and kind == 2:
            assert served.post(path, {**body, name: values[kind]}).status_code == 400
            continue
        if path == CLAUDE and kind == 0:
            del body["max_tokens"]
        response = served.post(path, {"max_tokens": 60, **body, name: values[kind]} if kind and
                               path == COMPLETIONS else {**body, name: values[kind]})  # fmt: skip
        assert response.status_code == 200, (path, response.text)
        answer = response.json()
        assert "warnings" not in answer, path
        expected = (KETTLE[:5], KETTLE[:3])[kind] if kind < 2 else None
        if expected is not None:
            assert json.dumps(expected) in response.text, path


def test_a_length_without_a_limit(served: Running) -> None:
    answer = served.post(COMPLETIONS, {"prompt": "long answer", "n_predict": -1}).json()
    assert answer["choices"][0]["text"].endswith("299 ")
    differ = served.post(CHAT, {**messages("hi"), "n_predict": 4, "max_tokens": 5})
    assert differ.status_code == 400 and differ.json()["error"]["param"] == "n_predict"
    wrong = served.post(CHAT, {**messages("hi"), "n_predict": "many"}).json()["error"]
    assert wrong["param"] == "n_predict" and wrong["message"].startswith("n_predict:")


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_known_field_is_refused_by_name_but_not_for_a_value_that_means_nothing(name: str) -> None:
    for value in NEUTRAL[name]:
        assert refuse(name, value)
    for value in ({"some": "thing"}, 0.37, ["thing"]):
        with pytest.raises(ApiError, match=f"^{name} is not supported here") as caught:
            refuse(name, value)
        assert (caught.value.status, caught.value.field) == (400, name)
    assert not refuse("brand_new", 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, CLAUDE])
def test_every_route_looks(served: Running, path: str) -> None:
    """Refused with its name; defaults that clients send along pass without a word."""
    body = bodies("the kettle")[path]
    for name, value in {"ignore_eos": True, "stop_token_ids": [5], "typical_p": 0.4}.items():
        error = served.post(path, {**body, name: value})
        assert error.status_code == 400 and name in error.text
    quiet = {"ignore_eos": False, "min_tokens": 0, "mirostat": 0, "typical_p": 1.0, "top_a": 0,
             "stop_token_ids": [], "skip_special_tokens": True}  # fmt: skip
    answer = served.post(path, {**body, **quiet})
    assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text


def test_what_a_template_does_not_read_is_named(served: Running) -> None:
    """The scripted template reads enable_thinking; it names no tools and no other variable."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    warnings = served.chat("the kettle", tools=tools)["warnings"]
    assert len(warnings) == 1 and "no place for tools" in warnings[0]
    assert "warnings" not in served.chat("the kettle", tools=tools, tool_choice="none")
    asked = served.chat("the kettle", chat_template_kwargs={"foo": 1, "enable_thinking": False})
    assert [w.split()[0] for w in asked["warnings"]] == ["chat_template_kwargs.foo"]


def test_efforts_and_calls_a_template_does_not_show_are_named(
    served: Running, tmp_path: Path
) -> None:
    """The shared template turns thinking on and off and shows calls; a plain one does neither."""
    assert "warnings" not in served.chat("the kettle", reasoning_effort="none")
    [levels] = served.chat("the kettle", reasoning_effort="low")["warnings"]
    assert "no levels of effort" in levels
    called = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        *messages("look")["messages"],
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "the kettle"},
    ]
    assert "warnings" not in served.post(CHAT, {"messages": chat}).json()
    plain = "{% for m in messages %}{{ m.content or '' }}{% endfor %}"
    with running(tmp_path, {"template": plain, "answers": []}) as bare:
        [said] = bare.post(CHAT, {"messages": chat}).json()["warnings"]
        assert "does not show the calls" in said
        [said] = bare.chat("hi", reasoning_effort="high")["warnings"]
        assert "no effort of thinking" in said


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_c33_a_schema_asked_for_in_anthropics_way(served: Running, name: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {**messages("hi"), "max_tokens": 300, "thinking": {"type": "disabled"}}
    asked = form if name == "output_format" else {"format": form}
    answer = served.post(CLAUDE, {**body, name: asked}).json()
    assert json.loads(answer["content"][0]["text"]) == {"a": "x"}
    bad = {"type": "json_schema", "schema": {"type": "string", "pattern": "("}}
    error = served.post(CLAUDE, {**body, name: bad if name == "output_format" else {"format": bad}})
    assert error.status_code == 400 and "regex" in error.text
    none = {"type": "xml"}
    error = served.post(
        CLAUDE, {**body, name: none if name == "output_format" else {"format": none}}
    )
    assert error.status_code == 400 and name in error.text


def test_a_range_of_penalties_matters_when_there_are_some(served: Running) -> None:
    """llama.cpp's clients send repeat_last_n always; without a penalty it means nothing."""
    body = {**messages("the kettle"), "repeat_last_n": 64}
    assert "warnings" not in served.post(CHAT, {**body, "repeat_penalty": 1.0}).json()
    assert (
        served.post(CHAT, {**body, "repeat_last_n": -1, "repeat_penalty": 1.1}).status_code == 200
    )
    for penalty in ({"repeat_penalty": 1.1}, {"frequency_penalty": 1}):
        error = served.post(CHAT, {**body, **penalty})
        assert error.status_code == 400 and error.json()["error"]["param"] == "repeat_last_n"
