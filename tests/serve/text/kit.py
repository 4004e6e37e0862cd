"""Runs answers through parsers, whole or cut, and folds the deltas to what a client would hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.serve.text.deltas import (
    CONTROL_CLOSE,
    CONTROL_OPEN,
    ContentText,
    Delta,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from strata.serve.text.parsers import parser_for
from strata.serve.text.specs import ToolSpec

HINTS = {
    "json": ("qwen3_moe", "<tool_call>"),
    "qwen": ("qwen3_next", "<tool_call><function="),
    "glm": ("glm4_moe", "<tool_call><arg_key>"),
    "deepseek": ("deepseek_v3", "<｜tool▁call▁begin｜>"),
    "harmony": ("gpt_oss", "<|channel|>"),
}
TOOLS = (
    ToolSpec("now", "", {"type": "object", "properties": {}}),
    ToolSpec(
        "write",
        "",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "mode": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "force": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
                "ratio": {"type": "number"},
                "any": {},
                "ref": {"$ref": "#/$defs/code"},
            },
            "$defs": {"code": {"enum": ["007", "008"]}},
        },
    ),
)


def c(*names: str) -> str:
    """Control tokens as the engine's text marks them."""
    return "".join(f"{CONTROL_OPEN}<|{name}|>{CONTROL_CLOSE}" for name in names)


@dataclass
class Call:
    """A call as a client holds it."""

    id: str
    name: str
    arguments: str = ""

    @property
    def value(self) -> Any:
        """The arguments, which must be JSON."""
        return json.loads(self.arguments)


@dataclass
class Folded:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def fold(deltas: Iterable[Delta]) -> Folded:
    """Join the deltas by kind and index; indexes must count up, texts must not be empty."""
    answer = Folded()
    for delta in deltas:
        match delta:
            case ReasoningText(text):
                answer.reasoning += text
            case ContentText(text):
                answer.content += text
            case ToolCallStart(index, id, name):
                assert index == len(answer.calls)
                answer.calls.append(Call(id, name))
                continue
            case ToolCallArguments(index, text):
                assert index == len(answer.calls) - 1
                answer.calls[index].arguments += text
        assert text
    return answer


def parse(
    form: str,
    pieces: Sequence[str] | str,
    *,
    tools: Sequence[ToolSpec] = TOOLS,
    reasoning: bool = True,
    prompt_tail: str = "",
) -> Folded:
    """One answer of the format, fed in these pieces; ids of calls are id0, id1, ..."""
    ids = iter(f"id{i}" for i in range(1000))
    family, hint = HINTS[form]
    parser = parser_for(
        family,
        hint,
        tools,
        reasoning=reasoning,
        prompt_tail=prompt_tail,
        call_id=lambda: next(ids),
    )
    deltas: list[Delta] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        deltas += parser.feed(piece)
    return fold([*deltas, *parser.finish()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(at, at[1:], strict=False)]
