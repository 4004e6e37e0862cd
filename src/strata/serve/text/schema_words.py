"""The keywords of JSON schemas: those that can be enforced, and those that only describe.

A white list: what is neither would be passed over in silence by the library, so that a misspelt
keyword would give an answer without the limit. Knows no grammar.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

ENFORCED = frozenset({
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
DESCRIBING = frozenset({
    # JSON Schema
    "$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema",
    # OpenAPI, editors and the libraries that write schemas
    "example", "externalDocs", "xml", "discriminator", "enumNames", "enumDescriptions",
    "markdownDescription", "deprecationMessage", "errorMessage", "propertyOrdering",
})  # fmt: skip
_IN_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_IN_ONE = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "additionalItems",
)  # fmt: skip


def parts(schema: Any, pointer: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(JSON pointer, schema) of a schema and all schemas in it, outer ones first."""
    if not isinstance(schema, Mapping):
        return
    yield pointer, schema
    for key in _IN_ONE:
        yield from parts(schema.get(key), f"{pointer}/{key}")
    for key in _IN_LIST:
        for i, part in enumerate(schema[key] if isinstance(schema.get(key), list) else ()):
            yield from parts(part, f"{pointer}/{key}/{i}")
    for key in _IN_MAP:
        children = schema.get(key)
        for name, part in children.items() if isinstance(children, Mapping) else ():
            step = str(name).replace("~", "~0").replace("/", "~1")
            yield from parts(part, f"{pointer}/{key}/{step}")


def unknown_word(schema: Any) -> str | None:
    """The first keyword that is not known here, and where it stands; None if there is none."""
    for pointer, part in parts(schema):
        for word in part:
            if word in ENFORCED or word in DESCRIBING:
                continue
            if word.startswith("x-") and word != "x-guidance":
                continue
            close = difflib.get_close_matches(word, ENFORCED, n=1, cutoff=0.8)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            return f"the keyword {word!r} at {pointer or '/'} is not supported{meant}"
    return None
