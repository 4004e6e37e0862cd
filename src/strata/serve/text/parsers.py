"""Which parser reads a model's answers, and the parser of models that think between tags.

Knows formats by the architecture's name and by what the chat template spells; knows no protocol of
clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from strata.serve.text.answer import ReadingParser
from strata.serve.text.calls import CallReader, DeepSeekCalls, JsonCalls
from strata.serve.text.calls_pairs import GlmCalls, QwenCalls
from strata.serve.text.deltas import AnswerParser
from strata.serve.text.harmony import HarmonyParser
from strata.serve.text.source import Reading, Tags
from strata.serve.text.specs import ConstraintSpec, ToolSpec

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
HARMONY_END = "<|channel|>final<|message|>"
CallFormat = Literal["json", "qwen", "glm", "deepseek", "harmony"]
READERS: Mapping[str, type[CallReader]] = {
    "json": JsonCalls,
    "qwen": QwenCalls,
    "glm": GlmCalls,
    "deepseek": DeepSeekCalls,
}
_KEPT = (
    THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", *DeepSeekCalls.words,
)  # fmt: skip


def call_format(family: str, template_hint: str) -> CallFormat:
    """How a model writes tool calls; what its template spells counts before its family."""
    spelled: list[tuple[str, CallFormat]] = [
        ("<|channel|>", "harmony"),
        ("<arg_key>", "glm"),
        ("<function=", "qwen"),
        ("<｜tool▁call", "deepseek"),
        ("<tool_call>", "json"),
    ]
    for word, name in spelled:
        if word in template_hint:
            return name
    if family == "gpt_oss":
        return "harmony"
    if family.startswith("glm"):
        return "glm"
    return "deepseek" if family.startswith("deepseek") else "qwen"


def thinking_at(prompt_tail: str) -> Literal["open", "closed", "unsaid"]:
    """Whether the prompt has opened thinking, closed it, or left it to the model."""
    tail = prompt_tail.rstrip()
    if tail.endswith(THINK_OPEN):
        return "open"
    return "closed" if tail.endswith(THINK_CLOSE) else "unsaid"


def parser_for(
    family: str,
    template_hint: str,
    tools: Sequence[ToolSpec],
    *,
    reasoning: bool,
    prompt_tail: str,
    call_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """A fresh parser for one answer; see the package for the arguments. call_id: makes the ids of
    calls, drawn at random without it."""
    form = call_format(family, template_hint)
    if form == "harmony":
        return HarmonyParser(tools, reasoning=reasoning, prompt_tail=prompt_tail, call_id=call_id)
    return TagParser(form, tools, reasoning=reasoning, prompt_tail=prompt_tail, call_id=call_id)


def reasoning_end(family: str, template_hint: str, prompt_tail: str) -> str | None:
    """The text that ends thinking when the answer begins with thinking, else None."""
    if call_format(family, template_hint) == "harmony":
        return None if prompt_tail.endswith("<|message|>") else HARMONY_END
    return THINK_CLOSE if thinking_at(prompt_tail) == "open" else None


def with_thinking(
    spec: ConstraintSpec, family: str, template_hint: str, prompt_tail: str
) -> ConstraintSpec:
    """The spec with the thinking that comes, or may come, before the form: a model whose template
    can switch thinking may begin with it where the prompt leaves that to it."""
    end = reasoning_end(family, template_hint, prompt_tail)
    switched = "enable_thinking" in template_hint and thinking_at(prompt_tail) == "unsaid"
    if end is None and switched:
        return replace(spec, reasoning_end=THINK_CLOSE, reasoning_open=THINK_OPEN)
    return replace(spec, reasoning_end=end)


class TagParser(ReadingParser):
    """Thinking between ``<think>`` and ``</think>``, calls between tags, the rest is content.

    Thinking is only where the prompt or the first word of the answer opens it, and ends once;
    later the tags are ordinary text. A call inside thinking is a call.
    """

    def __init__(
        self,
        form: CallFormat,
        tools: Sequence[ToolSpec],
        *,
        reasoning: bool,
        prompt_tail: str,
        call_id: Callable[[], str] | None = None,
    ) -> None:
        self._form = form
        self._tools = tools
        self._splits = reasoning
        self._begin = thinking_at(prompt_tail) if reasoning else "closed"
        super().__init__({word: word for word in _KEPT}, call_id)

    def read(self) -> Reading[None]:
        """The whole answer."""
        calls = READERS[self._form](self.source, self.out, self._tools) if self._tools else None
        opens = calls.opens if calls else ()
        yield from self._open()
        while self._thinking:
            tag = yield from self.source.text_until(Tags([THINK_CLOSE, *opens]), self.emit)
            if tag is None:
                return
            if tag == THINK_CLOSE:
                self.out.tag()
                self._thinking = False
            else:
                yield from self._call(calls, tag)
        while (tag := (yield from self.source.text_until(Tags(opens), self.emit))) is not None:
            yield from self._call(calls, tag)

    def _open(self) -> Reading[None]:
        """Find out whether the answer begins with thinking."""
        if self._begin == "closed":
            if self._splits:
                self.out.tag()  # the prompt's: line breaks behind it are not content
            return
        space = yield from self.source.skip_space()
        opened = yield from self.source.next_is(Tags([THINK_OPEN]))
        self._thinking = self._begin == "open" or opened is not None
        if opened:
            self.out.tag()
        else:
            self.emit(space)

    def _call(self, calls: CallReader | None, tag: str) -> Reading[None]:
        assert calls is not None, "only a reader of calls has tags that open one"
        yield from calls.read(tag, self.emit)
