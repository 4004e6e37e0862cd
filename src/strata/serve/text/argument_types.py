"""Values of arguments that a model wrote as plain text, turned into JSON by the tool's schema.

Tag formats do not say whether ``5`` is a number or a text; the schema does. What does not fit its
type becomes a JSON string, so that nothing is lost. Calls held to a grammar are read as the grammar
writes them: texts as they are, every other value as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 32


def is_text_schema(schema: Any) -> bool:
    """Whether a grammar of calls writes the value as plain text, not as JSON."""
    if not isinstance(schema, Mapping):
        return False
    choices = choices_of(schema)
    texts = bool(choices) and all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string" or "type" not in schema and texts


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values that enum and const admit; none when the schema has neither."""
    choices = schema.get("enum")
    if "const" in schema:
        const = schema["const"]
        return [] if isinstance(choices, list) and const not in choices else [const]
    return choices if isinstance(choices, list) else []


class ArgumentTypes:
    """The types of one tool's arguments. strict: the calls are held to a grammar."""

    def __init__(self, parameters: Mapping[str, Any], strict: bool = False) -> None:
        self._root = parameters
        self._strict = strict
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def is_text(self, key: str) -> bool:
        """Whether the argument can be nothing but a string, so that it may be streamed."""
        if self._strict and key in self._properties:
            return is_text_schema(self._properties[key])
        return self._types(key) == {"string"}

    def as_json(self, key: str, text: str) -> str:
        """JSON of an argument's text."""
        types = self._types(key)
        value = _parsed(text)
        if value is not None and self._strict and not self.is_text(key):
            return json.dumps(value[0], ensure_ascii=False)
        if value is not None:
            kinds = _kinds(value[0])
            known = key in self._properties
            if known and "string" in types:
                # "5" for a string or a number stays a string; lists, objects and null do not
                kinds &= {"array", "object", "null"}
            if kinds & types:
                return json.dumps(_whole(value[0], types), ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False)

    def _types(self, key: str) -> frozenset[str]:
        return self._of(self._properties.get(key, {}), 0)

    def _of(self, schema: Any, depth: int) -> frozenset[str]:
        """Types that a schema admits."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ALL
        types = _ALL
        declared = schema.get("type")
        if isinstance(declared, str):
            types = _named([declared])
        elif isinstance(declared, list):
            types = _named(declared)
        for options in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(options, list) and options:
                types &= frozenset().union(*(self._of(option, depth + 1) for option in options))
        for schema_part in schema.get("allOf") or ():
            types &= self._of(schema_part, depth + 1)
        values = choices_of(schema)
        if values:
            types &= frozenset().union(*map(_kinds, values))
        if isinstance(schema.get("$ref"), str):
            types &= self._of(self._at(schema["$ref"]), depth + 1)
        return types

    def _at(self, reference: str) -> Any:
        """The part of the tool's schema that a local reference points to."""
        if not reference.startswith("#/"):
            return {}
        found: Any = self._root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step, {}) if isinstance(found, Mapping) else {}
        return found


def _named(names: list[Any]) -> frozenset[str]:
    """The types of these names; every whole number is a number."""
    found = frozenset(name for name in names if isinstance(name, str))
    return found | {"integer"} if "number" in found else found


def _parsed(text: str) -> tuple[Any] | None:
    """The JSON value that the text is, if it is one; Python's words count too."""
    text = text.strip()
    try:
        return (json.loads(_PYTHON.get(text, text), parse_constant=_refuse, strict=False),)
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _kinds(value: Any) -> frozenset[str]:
    """Names of the JSON types a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    if value is None:
        return frozenset({"null"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array"} if isinstance(value, list) else {"object"})


def _whole(value: Any, types: frozenset[str]) -> Any:
    """5.0 as 5 where only whole numbers are wanted."""
    whole = isinstance(value, float) and value.is_integer() and "number" not in types
    return int(value) if whole else value
