"""Schemas that cannot be enforced, named with their place; grammars of calls in every format.

Expectations: the places are JSON pointers written by hand; calls are read back by the parsers.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from strata.core.errors import InputError
from strata.engine.constraint import GrammarConstraint
from strata.serve.text.constraints import check_constraint, constraint_for
from strata.serve.text.parsers import HARMONY_END, with_thinking
from strata.serve.text.specs import ConstraintSpec, ToolSpec
from tests.serve.text.kit import HINTS, TOOLS, parse

STRING = {"type": "string"}


def m(*names: str) -> str:
    """Control tokens as parsers see them."""
    return "".join(f"\ufdd0{name}\ufdd1" for name in names)


DEFS = {"$defs": {"a": {"type": "string", "format": "zonk"}}}


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "("}}},
            "regex",
            "/properties/a/pattern",
        ),
        ({"properties": {"x/y": {"items": {"uniqueItems": True}}}}, "'uniqueItems'", "/x~1y/items"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "'not'", "/anyOf/1"),
        ({"if": {}, "then": {}}, "'if'", "at / "),
        ({"type": "foo"}, "foo", "at /:"),
        ({**DEFS, "items": {"$ref": "#/$defs/a"}}, "zonk", "at /$defs/a:"),
        (
            {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "minLength": 3, "maxLength": 1},
            },
            "minLength",
            "at /items:",
        ),
        ({"properties": {"a": {"divisibleBy": 2}}}, "'divisibleBy'", "/properties/a"),
        ({"properties": {"z": {"type": "integer", "blorb": 3}}}, "'blorb'", "at /properties/z "),
        (
            {"$defs": {"n": {"maximun": 3}}, "$ref": "#/$defs/n"},
            "'maximun'",
            "at /$defs/n is not supported; did you mean 'maximum'?",
        ),
        ({"items": [{}, {"nullable": True}]}, "'nullable'", "at /items/1 "),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'", "at / "),
        ({"$ref": "#/nowhere"}, "nowhere", "at /"),
        (["string"], "must be an object", ""),
        (False, "false", ""),
    ],
)
def test_c33_bad_schemas_name_keyword_and_place(schema: Any, keyword: str, place: str) -> None:
    with pytest.raises(InputError) as caught:
        check_constraint(ConstraintSpec("json_schema", schema))
    assert keyword in str(caught.value) and place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_that_only_describe_are_taken() -> None:
    """Names of properties and the values of enum, const and default are no keywords."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "x-order": ["blorb"],
        "properties": {
            "blorb": {"description": "d", "default": {"not": 1}, "examples": [{"if": 1}]},
            "maximun": {"enum": [{"not": 1}], "deprecated": True},
        },
    }
    check_constraint(ConstraintSpec("json_schema", schema))


@pytest.mark.parametrize(
    "spec",
    [
        ConstraintSpec("regex", "(a"),
        ConstraintSpec("regex", "a(?=b)"),
        ConstraintSpec("regex", ""),
        ConstraintSpec("grammar", "start: nowhere"),
        ConstraintSpec("grammar", None),
        ConstraintSpec("choice", []),
        ConstraintSpec("choice", [""]),
        ConstraintSpec("tool_calls", {"tools": []}),
        ConstraintSpec("tool_calls", {"tools": [
            {"name": "a", "parameters": {"properties": {"b": {"not": {}}}}}]}),
    ],
)  # fmt: skip
def test_other_bad_forms(spec: ConstraintSpec) -> None:
    with pytest.raises(InputError) as caught:
        check_constraint(spec)
    assert "\n" not in str(caught.value)


class Bytes:
    """A vocabulary of bytes and the control tokens of every format."""

    controls = (
        "<|end_of_text|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )  # fmt: skip
    n_vocab = 256 + len(controls)
    eos_ids = (256,)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.controls[token - 256].encode()

    def is_control(self, token: int) -> bool:
        return token >= 256

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return list(text.encode())


BYTES = Bytes()


def written(constraint: GrammarConstraint, seed: int, form: str) -> str | None:
    """A random text the grammar admits, ends preferred; None when it does not end in time."""
    rng = np.random.default_rng(seed)
    likes = dict.fromkeys(b'\n<>/}",eopg', 3.0)
    data, marked = bytearray(), ""
    for _ in range(400):
        row = rng.gumbel(size=BYTES.n_vocab)
        for letter, more in likes.items():
            row[letter] += more
        row[256:] += 6
        row[128:256] -= 4
        constraint.mask(row)
        token = int(row.argmax())
        constraint.accept(token)
        if constraint.ended:
            return marked + data.decode("utf-8", "replace")
        if token < 256:
            data.append(token)
        else:
            marked += data.decode("utf-8", "replace")
            data.clear()
            marked += f"\ufdd0{BYTES.token_bytes(token).decode()}\ufdd1"
    return None


@pytest.mark.parametrize("only", [None, "write"])
@pytest.mark.parametrize("form", HINTS)
def test_required_calls_are_read_back_and_validate(form: str, only: str | None) -> None:
    family, hint = HINTS[form]
    tools = [
        {"name": "now", "parameters": {}},
        {"name": "write", "parameters": {
            "type": "object",
            "properties": {"mode": {"type": "integer"}, "k": {"enum": ["a", "b"]},
                           "force": {"type": "boolean"}},
            "required": ["mode", "k"], "additionalProperties": False}},
    ]  # fmt: skip
    end = HARMONY_END if form == "harmony" else None
    value = {"tools": tools, "only": only, "family": family, "template_hint": hint}
    spec = ConstraintSpec("tool_calls", value, end)
    check_constraint(spec)
    n_ended = 0
    for seed in range(6):
        text = written(constraint_for(spec, BYTES), seed, form)
        if text is None:
            continue
        n_ended += 1
        answer = parse(form, text, tools=TOOLS)
        assert answer.calls and not answer.content.strip()
        for call in answer.calls:
            value_of = json.loads(call.arguments or "{}")
            assert call.name == "write" if only else call.name in ("now", "write")
            if call.name == "write":
                assert isinstance(value_of["mode"], int) and value_of["k"] in ("a", "b")
    assert n_ended >= 3


def admits(spec: ConstraintSpec, text: str, ends: bool = True) -> bool:
    """Whether the grammar admits the text, control tokens marked, (and ends there)."""
    made = constraint_for(spec, BYTES)
    names = {BYTES.token_bytes(i).decode(): i for i in range(256, BYTES.n_vocab)}
    for part in re.split("(\ufdd0.*?\ufdd1)", text):
        plain = part.strip("\ufdd0\ufdd1")
        for token in [names[plain]] if part != plain else part.encode():
            made.mask(row := np.zeros(BYTES.n_vocab))
            if row[token] != 0:
                return False
            made.accept(token)
    made.mask(row := np.zeros(BYTES.n_vocab))
    return bool(row[256] == 0) if ends else True


NOTE = "two\nlines, and </tool> <x>\n"
NOTES = {
    "json": '<tool_call>\n{"name": "note", "arguments": '
    '{"text": "two\\nlines", "n": 1}}\n</tool_call>',
    "qwen": "<tool_call>\n<function=note>\n<parameter=text>\n" + NOTE + "\n</parameter>\n"
    "<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>" + NOTE + "</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": m("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>") + "note"
    + m("<｜tool▁sep｜>") + '{"text": "two", "n": 1}' + m("<｜tool▁call▁end｜>")
    + m("<｜tool▁calls▁end｜>"),
    "harmony": m("<|channel|>") + "commentary to=functions.note " + m("<|constrain|>") + "json"
    + m("<|message|>") + '{"text": "two", "n": 1}',
}  # fmt: skip


PLAIN = [{"enum": ["C", "F"]}, {"const": "ok"}, {"enum": ["5", 5]}, {"enum": [5, "x"]},
         {"anyOf": [{"type": "string", "enum": ["5"]}, {"type": "null"}]},
         {"type": ["string", "null"], "enum": ["null"]}, {"type": ["string", "integer"]},
         {"type": "string", "enum": ["true", '"q"']}, {"type": "number"},
         {"type": "string", "enum": ["", 5, "C"]}, {"enum": ["a", "b"], "const": "b"},
         {"anyOf": [{"type": "string", "enum": ["ab"]}, {"type": "integer"}]}]  # fmt: skip


@pytest.mark.parametrize("form", ["qwen", "glm", "json"])
def test_values_of_every_kind_of_schema_are_read_back_as_written(form: str) -> None:
    """What the grammar admits for an argument is, read back, admitted by the argument's schema
    (checked by jsonschema); also where texts are told from other values by quotes alone."""
    family, hint = HINTS[form]
    for schema in PLAIN:
        parameters = {"type": "object", "properties": {"u": schema}, "required": ["u"],
                      "additionalProperties": False}  # fmt: skip
        tool = {"name": "f", "parameters": parameters}
        value = {"tools": [tool], "only": None, "family": family, "template_hint": hint}
        spec = ConstraintSpec("tool_calls", value)
        n_ended = 0
        for seed in range(2):
            text = written(constraint_for(spec, BYTES), seed, form)
            if text is None:
                continue
            n_ended += 1
            tools = [ToolSpec("f", "", parameters, True)]
            for call in parse(form, text, tools=tools).calls:
                jsonschema.validate(json.loads(call.arguments), parameters)
        assert n_ended, schema


@pytest.mark.parametrize("form", HINTS)
def test_strict_tools_may_be_called_or_not(form: str) -> None:
    family, hint = HINTS[form]
    schema = {
        "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["text", "n"],
    }
    tool = {"name": "note", "parameters": schema, "strict": True}
    value = {"tools": [tool], "required": False, "family": family, "template_hint": hint}
    spec = ConstraintSpec("tool_calls", value, HARMONY_END if form == "harmony" else None)
    must = replace(spec, value={**value, "required": True})
    check_constraint(spec)
    call = NOTES[form]
    said = "I <b>look</b>.\nWell.\n"
    if form == "harmony":
        channel = [m("<|channel|>"), m("<|message|>")]
        thought = f"{channel[0]}analysis{channel[1]}hm{m('<|end|>')}{m('<|start|>')}assistant"
        said = f"{thought}{channel[0]}final{channel[1]}{said}"
        assert admits(spec, said) and admits(spec, thought + call)
        assert admits(must, thought + call) and not admits(must, said)
    else:
        assert admits(spec, said) and admits(spec, said + call) and admits(spec, call)
        assert admits(must, call) and not admits(must, said)
        if form != "deepseek":
            assert admits(spec, f"{said}{call}\n{call}")
    assert parse(form, call, tools=TOOLS).calls[0].value["n"] == 1
    assert not admits(spec, call.replace("1", "x", 1))
    assert not admits(spec, call.replace("note", "nope", 1))
    once = replace(spec, value={**value, "parallel": False})
    assert form == "harmony" or not admits(once, f"{call}\n{call}")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"t": {"type": "string", "maxLength": 3}}}, "'maxLength' at /properties/t"),
        (
            {"properties": {"t": {"type": "string", "enum": ["a"], "pattern": "b"}}},
            "'pattern' at /properties/t",
        ),
        ({"properties": {"t": {}}, "anyOf": [{"required": ["t"]}]}, "'anyOf' at / "),
        ({"properties": {"t": {}}, "required": ["u"]}, "requires 'u', which is not among"),
        ({"properties": {"t": {"type": "string", "enum": ["a"], "const": "b"}}}, "/properties/t"),
    ],
)
def test_strict_tools_refuse_what_their_format_cannot_hold(schema: Any, said: str) -> None:
    tool = {"name": "a", "parameters": schema, "strict": True}
    family, hint = HINTS["qwen"]
    value = {"tools": [tool], "family": family, "template_hint": hint}
    with pytest.raises(InputError, match=said):
        check_constraint(ConstraintSpec("tool_calls", value))


@pytest.mark.parametrize("form", ["qwen", "glm"])
def test_required_arguments_that_are_not_listed_are_written(form: str) -> None:
    """By hand: the value is JSON of the schema of additional properties, read back as such."""
    family, hint = HINTS[form]
    parameters = {"required": ["u"], "additionalProperties": {"type": "string"}}
    tool = {"name": "f", "parameters": parameters, "strict": True}
    spec = ConstraintSpec("tool_calls", {"tools": [tool], "family": family, "template_hint": hint})
    call = {
        "qwen": "<tool_call>\n<function=f>\n<parameter=u>\n{}\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm": "<tool_call>f\n<arg_key>u</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    }[form]
    assert admits(spec, call.format('"5"')) and not admits(spec, call.format("5"))
    strict = [ToolSpec("f", "", parameters, True)]
    assert parse(form, call.format('"5"'), tools=strict).calls[0].value == {"u": "5"}


def test_free_thinking_comes_first() -> None:
    spec = ConstraintSpec("regex", "[0-9]", "</think>")
    made = constraint_for(spec, BYTES)
    for letter in b"because\n</thin":
        made.mask(row := np.zeros(BYTES.n_vocab))
        assert row[letter] == 0 and row[256] == -np.inf
        made.accept(letter)
    for letter in b"k>\n7":
        made.mask(row := np.zeros(BYTES.n_vocab))
        made.accept(letter)
    made.mask(row := np.zeros(BYTES.n_vocab))
    assert np.flatnonzero(row == 0).tolist() == [256]


@pytest.mark.parametrize("text", ["7", "<think>so</think>\n7", "\n<think>so</think>7"])
def test_thinking_that_may_come(text: str) -> None:
    spec = with_thinking(ConstraintSpec("regex", "[0-9]"), "qwen3_moe", "enable_thinking", "x\n")
    made = constraint_for(ConstraintSpec.from_json(spec.as_json()), BYTES)
    for letter in text.encode():
        made.mask(row := np.zeros(BYTES.n_vocab))
        assert row[letter] == 0
        made.accept(letter)
    made.mask(row := np.zeros(BYTES.n_vocab))
    assert np.flatnonzero(row == 0).tolist() == [256]


@pytest.mark.parametrize(
    ("hint", "tail", "frame"),
    [
        ("enable_thinking", "x<think>\n", (None, "</think>")),
        ("enable_thinking", "<think></think>\n", (None, None)),
        ("enable_thinking", "assistant\n", ("<think>", "</think>")),
        ("", "assistant\n", (None, None)),
        ("<|channel|>", "<|start|>assistant", (None, HARMONY_END)),
    ],
)
def test_what_comes_before_the_form(hint: str, tail: str, frame: tuple[object, object]) -> None:
    spec = with_thinking(ConstraintSpec("json_object"), "qwen3_moe", hint, tail)
    assert (spec.reasoning_open, spec.reasoning_end) == frame
