"""From what a request asks for to one grammar in llguidance's Lark. Knows no tokens.

Thinking comes first where the model thinks, as free text up to the tag that ends it. JSON between
a model's own tags is written as models were trained to write it, with spaces but no line breaks;
JSON that is the answer may have one space or one line break with an indent between its parts, so
that a model cannot write white space for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from strata.core.errors import InputError, UnsupportedError
from strata.serve.text.argument_types import choices_of, is_text_schema
from strata.serve.text.parsers import HARMONY_END, call_format
from strata.serve.text.schema_words import ENFORCED
from strata.serve.text.specs import ConstraintSpec

IsControl = Callable[[str], bool]
"""Whether a spelling is one control token of the vocabulary."""

_LOOSE = {"whitespace_pattern": r" |\n {0,24}"}
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_END = "}\n</tool_call>"
_CONTROL = re.compile(r"(<[|｜][^<>|｜]+[|｜]>|</?\w+>)")
_TEXT_KEYS = frozenset({"type", "enum", "const"})
_PAIR_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
)
"""What pairs of key and value obey; the other keywords of a tool's schema need JSON."""


def grammar_of(spec: ConstraintSpec, is_control: IsControl) -> str:
    """The grammar of an answer; InputError for a spec that makes no sense."""
    rules = Rules(is_control)
    users: list[dict[str, str]] = []
    if spec.kind == "tool_calls":
        answer = _calls(rules, spec)
    elif spec.kind == "grammar":
        answer = "@asked"
        users.append({"name": "asked", "lark_grammar": _text(spec.value, "grammar")})
    else:
        answer = _plain(rules, spec)
    rules.lines.insert(0, f"start: {_thinking(rules, spec)} {answer}")
    lark = "\n".join(rules.lines)
    return json.dumps({"grammars": [{"lark_grammar": lark}, *users]})


class Rules:
    """Lines of a Lark grammar under construction."""

    def __init__(self, is_control: IsControl) -> None:
        self.lines: list[str] = []
        self._is_control = is_control

    def words(self, text: str) -> str:
        """Literal text; what is a control token of the vocabulary becomes that token."""
        parts = (part for part in _CONTROL.split(text) if part)
        return " ".join(part if self._is_control(part) else _quoted(part) for part in parts)

    def rule(self, body: str, lazy: bool = False) -> str:
        """A new rule's name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def until(self, text: str) -> str:
        """Free text up to and with ``text``, or up to the control token that it begins with."""
        parts = [part for part in _CONTROL.split(text) if part]
        plain = "".join(takewhile(lambda part: not self._is_control(part), parts))
        free = self.rule(f"/(?s:.*){_regex(plain)}/", lazy=bool(plain))
        rest = text.removeprefix(plain)
        return f"{free} {self.words(rest)}" if rest else free

    def json(self, schema: Any, style: Mapping[str, Any]) -> str:
        """JSON that a schema admits."""
        if schema is True:
            schema = {}
        if isinstance(schema, Mapping):
            schema = {**schema, "x-guidance": dict(style)}
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def any_of(self, bodies: Sequence[str]) -> str:
        """One of them."""
        return self.rule(" | ".join(bodies))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """The text as a regular expression of llguidance's."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} must be a text, not {type(value).__name__}")
    return value


def _thinking(rules: Rules, spec: ConstraintSpec) -> str:
    """What comes before the answer proper."""
    if spec.reasoning_end is None:
        return ""
    if spec.reasoning_end == HARMONY_END:
        thought = rules.words("<|channel|>analysis<|message|>")
        again = rules.rule(
            f"{thought} {rules.until('<|end|>')} {rules.words('<|start|>assistant')}"
        )
        return f"{again}*" + ("" if spec.kind == "tool_calls" else f" {rules.words(HARMONY_END)}")
    thought = f"{rules.until(spec.reasoning_end)} /[ \\n]{{0,3}}/"
    if spec.reasoning_open is None:
        return thought
    return f"(/\\n?/ {rules.words(spec.reasoning_open)} {thought})?"


def _plain(rules: Rules, spec: ConstraintSpec) -> str:
    """Answers that are content."""
    if spec.kind == "json_schema":
        return rules.json(spec.value, _LOOSE)
    if spec.kind == "json_object":
        return rules.json({"type": "object"}, _LOOSE)
    if spec.kind == "regex":
        return rules.rule(f"/{_slashes(_text(spec.value, 'regex'))}/")
    if spec.kind == "choice":
        if not isinstance(spec.value, list) or not spec.value:
            raise InputError("choice must be a list of texts, not empty")
        return rules.any_of([_quoted(_text(choice, "a choice")) for choice in spec.value])
    raise InputError(f"a constraint of kind {spec.kind!r} is not known")


def _slashes(pattern: str) -> str:
    """The pattern with its own slashes escaped, as Lark wants it."""
    return re.sub(r"\\.|/", lambda m: r"\/" if m.group() == "/" else m.group(), pattern, flags=re.S)


def _calls(rules: Rules, spec: ConstraintSpec) -> str:
    """Answers that are calls of tools; with required false, text and then maybe calls."""
    asked: Mapping[str, Any] = spec.value
    tools = [t for t in asked["tools"] if asked.get("only") in (None, t["name"])]
    if not tools:
        raise InputError("a call is asked for but no tool may be called")
    form = call_format(asked.get("family", ""), asked.get("template_hint", ""))
    frame = _FRAMES[form]
    call = rules.any_of([frame.write(rules, tool, asked) for tool in tools])
    several = asked.get("parallel", True) and asked.get("only") is None and frame.again is not None
    more = f"(/\\n?/ {rules.words(frame.again or '')} {call})*" if several else ""
    calls = rules.rule(f"{call} {more} {rules.words(frame.end)}")
    first = rules.words(frame.first)
    if asked.get("required", True):
        return f"{first} {calls}"
    if form == "harmony":
        final = rules.words(HARMONY_END)
        return f"({final} /(?s:.*)/ | {first} {calls})"
    if not first.startswith('"'):  # a control token: no text can hold it
        return f"/(?s:.*)/ ({first} {calls})?"
    rules.lines.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){_regex(frame.first)}(?s:.*)/")
    return f"(TEXT | {rules.until(frame.first)} {calls})"


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; names that it does not list are not wanted."""
    parameters = tool.get("parameters")
    schema = dict(parameters) if isinstance(parameters, Mapping) else {}
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def _json_call(rules: Rules, tool: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    head = _quoted(f'\n{{"name": {_quoted(tool["name"])}, "arguments": ')
    return f"{head} {rules.json(_schema(tool), _ONE_LINE)} {_quoted(_JSON_END)}"


def _harmony_call(rules: Rules, tool: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    head = f"commentary to=functions.{tool['name']} <|constrain|>json<|message|>"
    return f"{rules.words(head)} {rules.json(_schema(tool), _ONE_LINE)}"


def _deepseek_call(rules: Rules, tool: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    arguments = rules.json(_schema(tool), _ONE_LINE)
    fenced = "```json" in asked.get("template_hint", "")
    name = (
        f"function<｜tool▁sep｜>{tool['name']}\n```json\n"
        if fenced
        else f"{tool['name']}<｜tool▁sep｜>"
    )
    end = "\n```<｜tool▁call▁end｜>" if fenced else "<｜tool▁call▁end｜>"
    return f"{rules.words(name)} {arguments} {rules.words(end)}"


def _qwen_call(rules: Rules, tool: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    pairs = _pairs(rules, tool, "<parameter={}>\n", "\n</parameter>\n")
    head = rules.words(f"\n<function={tool['name']}>\n")
    end = rules.words("</function>\n</tool_call>")
    return f"{head} {pairs} {end}"


def _glm_call(rules: Rules, tool: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    pairs = _pairs(rules, tool, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
    head = rules.words(f"{tool['name']}\n")
    return f"{head} {pairs} {rules.words('</tool_call>')}"


def _pairs(rules: Rules, tool: Mapping[str, Any], before: str, after: str) -> str:
    """The arguments between tags, in the schema's order; those that are not required may lack."""
    schema = _schema(tool)
    _require_enforced(tool, schema, _PAIR_KEYS, "/")
    properties = {**(schema.get("properties") or {}), **_unlisted(tool, schema)}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts: list[str] = []
    for key, value in properties.items():
        head = rules.words(before.format(key))
        body = _value(rules, tool, key, value, shared, after)
        pair = rules.rule(f"{head} {body}")
        parts.append(pair if key in (schema.get("required") or ()) else f"{pair}?")
    return " ".join(parts)


def _unlisted(tool: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schemas of the required arguments that are not among the properties; written as JSON."""
    listed = schema.get("properties") or {}
    names = [key for key in schema.get("required") or () if key not in listed]
    more = schema["additionalProperties"]
    if names and more is False:
        raise InputError(
            f"the tool {tool['name']} requires {names[0]!r}, which is not among its properties"
        )
    return {key: {"allOf": [more]} for key in names}


def _require_enforced(
    tool: Mapping[str, Any], schema: Mapping[str, Any], known: frozenset[str], place: str
) -> None:
    """UnsupportedError when a strict tool asks for more than these keywords."""
    beyond = sorted((set(schema) & ENFORCED) - known)
    if beyond and tool.get("strict"):
        raise UnsupportedError(
            f"the tool {tool['name']} is strict, but {beyond[0]!r} at {place} cannot be enforced "
            f"in the way this model writes calls"
        )


def _value(
    rules: Rules,
    tool: Mapping[str, Any],
    key: str,
    schema: Any,
    shared: Mapping[str, Any],
    after: str,
) -> str:
    """A value and the tag behind it: strings stand there as they are, the rest as JSON."""
    if not is_text_schema(schema):
        whole = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return f"{rules.json(whole, _ONE_LINE)} {rules.words(after)}"
    _require_enforced(tool, schema, _TEXT_KEYS, f"/properties/{key}")
    if "enum" in schema or "const" in schema:
        texts = [choice for choice in choices_of(schema) if isinstance(choice, str)]
        literals = [rules.words(text) or '""' for text in texts]
        if not literals:
            raise InputError(f"no text may stand at /properties/{key} of the tool {tool['name']}")
        return f"({' | '.join(literals)}) {rules.words(after)}"
    return rules.until(after)


@dataclass(frozen=True)
class _Frame:
    """How a format frames calls. write: a call behind what opens it. first: opens the first call;
    again: a further one, None where an answer holds only one; end: behind the last."""

    write: Callable[[Rules, Mapping[str, Any], Mapping[str, Any]], str]
    first: str
    again: str | None
    end: str = ""


_FRAMES: Mapping[str, _Frame] = {
    "json": _Frame(_json_call, "<tool_call>", "<tool_call>"),
    "qwen": _Frame(_qwen_call, "<tool_call>", "<tool_call>"),
    "glm": _Frame(_glm_call, "<tool_call>", "<tool_call>"),
    "deepseek": _Frame(
        _deepseek_call,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "harmony": _Frame(_harmony_call, "<|channel|>", None),
}
