"""Answers of every format, whole and cut anywhere. Expectations are written by hand from the
formats' public chat templates; the property is that cuts change nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.serve.text.deltas import ContentText, ReasoningText, ToolCallArguments, ToolCallStart
from strata.serve.text.parsers import HARMONY_END, call_format, parser_for, reasoning_end
from tests.serve.text.kit import HINTS, TOOLS, Call, Folded, c, cut, parse

TRICKY = 'say "</tool_call>" and <|channel|> \\ "é\U0001f600\n\t{[' + "</parameter></arg_value>"
ARGUMENTS = {"path": "a b/ü.txt", "text": TRICKY, "mode": 7}
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)


def qwen(name: str, **values: str) -> str:
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def deepseek(*calls: str) -> str:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    body = "\n".join(f"{begin}{call}{end}" for call in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def hermes(arguments: str, name: str = "write") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony(text: str, channel: str, to: str = "", end: str = "end") -> str:
    kind = " " + c("constrain") + "json" if to else ""
    return f"{c('channel')}{channel}{to}{kind}{c('message')}{text}" + (c(end) if end else "")


VALUES = {"path": ARGUMENTS["path"], "text": TRICKY, "mode": "7"}
BOTH = [Call("id0", "write", AS_JSON), Call("id1", "now", "{}")]
ANSWERS: dict[str, tuple[str, str, Folded]] = {
    "json": (
        "json",
        f"<think>\nhm\n</think>\n\nLet me.\n\n{hermes(AS_JSON)}\n{hermes('{}', 'now')}\n",
        Folded("hm", "Let me.", BOTH),
    ),
    "qwen": (
        "qwen",
        f"<think>hm</think>\nLet me.\n{qwen('write', **VALUES)}\n{qwen('now')}",
        Folded("hm", "Let me.", BOTH),
    ),
    "glm": (
        "glm",
        f"<think>hm</think>\nLet me.\n{glm('write', **VALUES)}\n{glm('now')}",
        Folded("hm", "Let me.", BOTH),
    ),
    "deepseek 3.1": (
        "deepseek",
        "<think>hm</think>Let me."
        + deepseek(f"write<｜tool▁sep｜>{AS_JSON}", "now<｜tool▁sep｜>{}"),
        Folded("hm", "Let me.", BOTH),
    ),
    "deepseek 3": (
        "deepseek",
        "Let me."
        + deepseek(
            f"function<｜tool▁sep｜>write\n```json\n{AS_JSON}\n```",
            "function<｜tool▁sep｜>now\n```json\n{}\n```",
        ),
        Folded("", "Let me.", BOTH),
    ),
    "harmony": (
        "harmony",
        harmony("hm", "analysis")
        + f"{c('start')}assistant{harmony('Let me.', 'commentary')}"
        + f"{c('start')}assistant{harmony(AS_JSON, 'commentary', ' to=functions.write', 'call')}"
        + f"{c('start')}assistant to=functions.now{harmony('', 'commentary', end='')}",
        Folded("hm", "Let me.", [BOTH[0], Call("id1", "now", "")]),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_c30_calls_of_every_format(name: str) -> None:
    form, text, expected = ANSWERS[name]
    answer = parse(form, text)
    got = [call.value if call.arguments else None for call in answer.calls]
    assert got == [call.value if call.arguments else None for call in expected.calls]
    assert [(call.id, call.name) for call in answer.calls] == [("id0", "write"), ("id1", "now")]
    assert (answer.reasoning, answer.content) == (expected.reasoning, expected.content)


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "write", "arguments": ',
    '{"path": "x"}', "}", "{", '"', "\\", "<function=write>", "<function=", "<parameter=text>",
    "</parameter>", "</function>", "write", "<arg_key>mode</arg_key>", "<arg_value>", "7",
    "</arg_value>", "\n", "  ", "é\U0001f600", "<", c("start"), c("channel"), c("message"),
    c("end"), c("call"), "analysis", "final", " to=functions.write", "assistant", "<|channel|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "function", "```json\n", "<｜tool▁calls▁end｜>", c("im_end"),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join) | (
    st.sampled_from([text for _, text, _ in ANSWERS.values()])
)
TAILS = st.sampled_from(["", "<think>\n", "<think></think>\n"])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(HINTS)), TEXTS, st.lists(st.integers(0, 400), max_size=12), TAILS)
def test_cuts_change_nothing(form: str, text: str, places: list[int], tail: str) -> None:
    whole = parse(form, text, prompt_tail=tail)
    assert parse(form, cut(text, places), prompt_tail=tail) == whole
    assert parse(form, list(text), prompt_tail=tail) == whole


LETTERS = st.text("abcé {}[]\"':,", max_size=12)
BROKEN = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<function=", "<", "{", '{"name"']) | LETTERS,
    max_size=10,
).map("".join)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["json", "qwen", "glm"]), BROKEN)
def test_what_is_no_call_stays_content(form: str, text: str) -> None:
    answer = parse(form, text, reasoning=False)
    if not answer.calls:
        assert answer.content == text


@pytest.mark.parametrize("name", ANSWERS)
def test_without_tools_the_tags_of_calls_are_text(name: str) -> None:
    form, text, _ = ANSWERS[name]
    answer = parse(form, text, tools=())
    assert not answer.calls and "a b/ü.txt" in answer.content


@pytest.mark.parametrize(
    ("form", "text", "deltas"),
    [
        ("json", hermes('{"path": "abc"}'), ['{"path"', ': "a', "bc"]),
        ("qwen", qwen("write", text="some words"), ['{"text": ', '"', "some w", "ords"]),
        ("glm", glm("write", text="some words"), ['{"text": ', '"', "some w", "ords"]),
    ],
)
def test_arguments_stream(form: str, text: str, deltas: list[str]) -> None:
    family, hint = HINTS[form]
    parser = parser_for(family, hint, TOOLS, reasoning=True, prompt_tail="")
    at = text.index("bc" if form == "json" else "ords")
    first = parser.feed(text[:at])
    assert isinstance(first[0], ToolCallStart) and first[0].name == "write"
    sent = [d.text for d in first if isinstance(d, ToolCallArguments)]
    sent += [d.text for d in parser.feed(text[at:][:4]) if isinstance(d, ToolCallArguments)]
    assert "".join(sent).startswith("".join(deltas[:-1]))


class TestTypes:
    """Values of tag formats by the schema of TOOLS[1]."""

    @pytest.mark.parametrize(
        ("key", "text", "value"),
        [
            ("path", "5", "5"),
            ("path", '{"a": 1}', '{"a": 1}'),
            ("mode", " 5 ", 5),
            ("mode", "5.0", 5),
            ("mode", "five", "five"),
            ("ratio", "5", 5),
            ("ratio", "-1.5e3", -1500.0),
            ("ratio", "NaN", "NaN"),
            ("force", "True", True),
            ("force", "false", False),
            ("force", "yes", "yes"),
            ("tags", '["a", "b"]', ["a", "b"]),
            ("tags", "a, b", "a, b"),
            ("note", "null", None),
            ("note", "None", None),
            ("note", "5", "5"),
            ("ref", "007", "007"),
            ("any", '{"a": [1]}', {"a": [1]}),
            ("any", "plain", "plain"),
            ("unknown", "12", 12),
        ],
    )
    @pytest.mark.parametrize("form", ["qwen", "glm"])
    def test_value(self, form: str, key: str, text: str, value: object) -> None:
        written = (qwen if form == "qwen" else glm)("write", **{key: text})
        got = parse(form, written).calls[0].value[key]
        assert got == value and type(got) is type(value)


class TestThinking:
    """C32: where thinking ends."""

    OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"

    def test_call_before_the_closing_tag(self) -> None:
        answer = parse("json", f"I must\n{hermes('{}', 'now')}", prompt_tail=self.OPEN)
        assert answer == Folded("I must", "", [Call("id0", "now", "{}")])

    def test_line_break_behind_thinking_that_the_prompt_closed(self) -> None:
        answer = parse("glm", "\n\nHello\n\nyou", prompt_tail="<|assistant|>\n<think></think>")
        assert answer == Folded("", "Hello\n\nyou")

    def test_prompt_closed_thinking(self) -> None:
        assert parse("json", "Hello", prompt_tail=self.CLOSED) == Folded("", "Hello")

    def test_prompt_opened_thinking(self) -> None:
        answer = parse("json", "why\n</think>\n\nbecause", prompt_tail=self.OPEN)
        assert answer == Folded("why", "because")

    def test_cut_inside_thinking(self) -> None:
        family, hint = HINTS["json"]
        parser = parser_for(family, hint, (), reasoning=True, prompt_tail=self.OPEN)
        assert parser.feed("so far ") == [ReasoningText("so far")] and parser.reasoning
        assert parser.finish() == [ReasoningText(" ")]

    @pytest.mark.parametrize("tail", [OPEN, CLOSED, ""])
    def test_tag_written_in_the_answer(self, tail: str) -> None:
        said = "The tag `</think>` ends it, `<think>` begins it."
        before = "hm</think>" if tail == self.OPEN else ""
        answer = parse("json", before + said, prompt_tail=tail)
        assert answer == Folded("hm" if before else "", said)

    def test_not_split_when_the_client_wants_it_whole(self) -> None:
        text = "<think>a</think>b"
        assert parse("json", text, reasoning=False) == Folded("", text)

    @pytest.mark.parametrize(
        ("form", "tail", "end"),
        [
            ("json", OPEN, "</think>"),
            ("json", CLOSED, None),
            ("json", "", None),
            ("harmony", "<|start|>assistant", HARMONY_END),
        ],
    )
    def test_reasoning_end(self, form: str, tail: str, end: str | None) -> None:
        assert reasoning_end(*HINTS[form], tail) == end


class TestBroken:
    """Calls that are none, and calls that are cut."""

    @pytest.mark.parametrize(
        "text",
        [
            "Use <tool_call> like this.",
            '<tool_call>{"nome": "write", "arguments": {}}</tool_call> and more',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "wri',
            "<tool_call>[1, 2]</tool_call>",
        ],
    )
    @pytest.mark.parametrize("form", ["json", "qwen", "glm"])
    def test_no_call(self, form: str, text: str) -> None:
        assert parse(form, text) == Folded("", text)

    @pytest.mark.parametrize("form", ["json", "qwen", "glm", "deepseek"])
    def test_a_call_that_is_cut_does_not_parse(self, form: str) -> None:
        whole = next(text for f, text, _ in ANSWERS.values() if f == form)
        at = whole.index("b/ü.txt")
        answer = parse(form, whole[: at + 3])
        assert answer.calls[0].name == "write" and answer.calls[0].arguments.endswith("a b/ü")

    def test_name_after_arguments_and_arguments_as_text(self) -> None:
        text = '<tool_call>{"arguments": "{\\"path\\": 1}", "name": "write"}</tool_call>x'
        assert parse("json", text) == Folded("", "x", [Call("id0", "write", '{"path": 1}')])

    def test_forgotten_brackets_and_raw_line_breaks(self) -> None:
        text = '<tool_call>{"name": "write", "arguments": {"text": "a\nb"}</tool_call>x'
        answer = parse("json", text)
        assert answer.calls[0].value == {"text": "a\nb"} and answer.content == "x"

    def test_no_outer_tag(self) -> None:
        text = "<function=write>\n<parameter=mode>\n3\n</parameter>\n</function>"
        assert parse("qwen", text).calls == [Call("id0", "write", '{"mode": 3}')]

    def test_a_qwen_that_writes_json(self) -> None:
        assert parse("qwen", hermes('{"mode": 3}')).calls == [Call("id0", "write", '{"mode": 3}')]

    def test_values_keep_their_own_line_breaks(self) -> None:
        text = qwen("write", text="\n  a\n\n")
        assert parse("qwen", text).calls[0].value == {"text": "\n  a\n\n"}


class TestHarmony:
    """gpt-oss: only control tokens structure an answer."""

    def test_spelled_tokens_are_text(self) -> None:
        said = "<|channel|>analysis<|message|>x<|end|>"
        assert parse("harmony", harmony(said, "final", end="")) == Folded("", said)

    @pytest.mark.parametrize(
        "header",
        [
            f" to=functions.write{c('channel')}commentary json",
            f" to=functions.write{c('channel')}analysis {c('constrain')}json",
            f"{c('channel')}commentary to=functions.write json",
            f"{c('channel')}commentary to=write {c('constrain')}json",
        ],
    )
    def test_recipient_anywhere_in_the_header(self, header: str) -> None:
        answer = parse("harmony", f'{header}{c("message")}{{"mode": 1}}{c("call")}')
        assert answer == Folded("", "", [Call("id0", "write", '{"mode": 1}')])

    def test_no_channel_at_all(self) -> None:
        assert parse("harmony", "plain words") == Folded("", "plain words")

    def test_prompt_that_began_the_message(self) -> None:
        tail = "<|start|>assistant<|channel|>final<|message|>"
        assert parse("harmony", "to=me", prompt_tail=tail) == Folded("", "to=me")

    def test_reasoning_is_counted_inside_analysis_only(self) -> None:
        parser = parser_for(*HINTS["harmony"], (), reasoning=True, prompt_tail="")
        seen = []
        for piece in [c("channel"), "analysis", c("message"), "hm", c("end", "start"), "assistant"]:
            parser.feed(piece)
            seen.append(parser.reasoning)
        assert seen == [False, False, True, True, False, False]


def test_plain_text_passes_at_once_and_unchanged() -> None:
    parser = parser_for("llama", "", (), reasoning=True, prompt_tail="")
    pieces = ["Hi", " there", ",\n", "friend\n"]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    assert deltas[0] == ContentText("Hi")
    assert "".join(d.text for d in deltas if isinstance(d, ContentText)) == "".join(pieces)


@pytest.mark.parametrize(
    ("family", "hint", "form"),
    [
        ("qwen3_next", "{{ '<tool_call><function=' }}", "qwen"),
        ("qwen3_moe", '<tool_call>\\n{"name"', "json"),
        ("qwen4_exp", "", "qwen"),
        ("glm4_moe", "", "glm"),
        ("deepseek_v3", "", "deepseek"),
        ("gpt_oss", "", "harmony"),
        ("llama", "<|start|>assistant<|channel|>", "harmony"),
    ],
)
def test_format_by_template_then_family(family: str, hint: str, form: str) -> None:
    assert call_format(family, hint) == form
