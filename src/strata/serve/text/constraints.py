"""The doors to structured output: a check before a request is queued, and the engine's object.

A form that cannot be enforced is an error that names the keyword and its place; there is no way
from here to an answer without the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

try:
    from llguidance.gbnf_to_lark import gbnf_to_lark
except ImportError:  # the check of the grammar says what is missing
    gbnf_to_lark = None  # type: ignore[assignment]

from strata.core.errors import InputError
from strata.engine.constraint import GrammarConstraint, grammar_error, schema_error, table_of
from strata.formats.text import quoted
from strata.serve.text.grammar import grammar_of
from strata.serve.text.schema_words import parts, unknown_word
from strata.serve.text.specs import ConstraintSpec, TokenizerLike

_MAX_TRIED = 300
_UNMET = "Unsatisfiable schema"


def check_constraint(spec: ConstraintSpec) -> None:
    """InputError that names the keyword or pattern that cannot be enforced, and its place."""
    for place, schema in _asked_schemas(spec):
        _check_schema(schema, place)
    error = grammar_error(grammar_of(spec, lambda spelling: False))
    if error is not None:
        raise InputError(f"the {spec.kind} asked for cannot be enforced: {_brief(error)}")


def constraint_for(spec: ConstraintSpec, tokenizer: TokenizerLike) -> GrammarConstraint:
    """The object that masks one answer's logits."""
    table = table_of(tokenizer)
    return GrammarConstraint(grammar_of(spec, table.controls.__contains__), table)


def lark_of(grammar: str) -> str:
    """A grammar in Lark; one in GBNF (llama.cpp's form, told by ``::=``) is translated. InputError
    for text that is neither."""
    if "::=" not in grammar or gbnf_to_lark is None:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library's parser raises whatever it meets
        raise InputError(f"it is no GBNF: {_brief(' '.join(str(error).split()))}") from None


def _asked_schemas(spec: ConstraintSpec) -> Iterator[tuple[str, Any]]:
    """(where it stands, the schema) of everything that must validate."""
    if spec.kind == "json_schema":
        yield "the schema", spec.value
    elif spec.kind == "tool_calls":
        for tool in spec.value["tools"]:
            yield f"the parameters of {tool['name']}", tool.get("parameters") or {}


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping | bool):
        raise InputError(f"{where} must be an object, not {quoted(str(schema), 60)}")
    try:
        unknown = unknown_word(schema)
        error = schema_error(schema)
    except RecursionError:
        raise InputError(f"{where} cannot be enforced: it is nested too deep") from None
    if unknown:
        raise InputError(f"{where} cannot be enforced: {unknown}")
    if error is None:
        return
    pointer, error = _innermost(schema, error)
    raise InputError(f"{where} cannot be enforced: at {pointer or '/'}: {_brief(error)}")


def _innermost(schema: Any, error: str) -> tuple[str, str]:
    """Where the smallest part stands that fails by itself in the same way, and its words."""
    found, words = "", error
    shared = {}
    if isinstance(schema, Mapping):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for pointer, part in islice(parts(schema), _MAX_TRIED):
        inside = pointer.startswith(("/$defs", "/definitions"))
        alone = schema_error(part if inside else {**shared, **part}) or ""
        unmet = error.startswith(_UNMET) and alone.startswith(_UNMET)
        if len(pointer) > len(found) and (alone == error or unmet):
            found, words = pointer, alone
            if "pattern" in part and _pattern_error(part["pattern"]):
                found += "/pattern"
    return found, words


def _pattern_error(pattern: Any) -> bool:
    return schema_error({"type": "string", "pattern": pattern}) is not None


def _brief(error: str) -> str:
    """The library's words without its picture of the place."""
    return re.sub(r"^(at )?\d+\(\d+\): ", "", error.split(" 1 | ")[0])[:240]
