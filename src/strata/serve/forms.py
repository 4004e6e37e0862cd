"""The form of an answer that a body asks for, under whatever name: one constraint, or a 400."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from strata.core.errors import InputError
from strata.serve.bodies import Sampled
from strata.serve.dialects import FORMS
from strata.serve.errors import ApiError
from strata.serve.text.constraints import lark_of
from strata.serve.text.specs import ConstraintKind, ConstraintSpec

_KINDS: Mapping[str, ConstraintKind] = {
    "json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
}  # fmt: skip


def asked_form(
    body: Sampled, response_format: Any, other: Any
) -> tuple[ConstraintSpec | None, str]:
    """(constraint or None, the field that asks for it) of response_format (OpenAI),
    structured_outputs (vLLM) and their older names; ApiError for two at once."""
    extra = body.model_extra or {}
    asked = [(name, extra[name]) for name in FORMS if extra.get(name) not in (None, "")]
    if isinstance(other, Mapping):
        given = {name: value for name, value in other.items() if value is not None}
        if len(given) != 1 or next(iter(given)) not in _KINDS:
            raise _wrong("structured_outputs", f"must be one of {', '.join(_KINDS)}")
        asked.append(("structured_outputs", given))
    spec = response_form(response_format)
    names = [name for name, _ in asked] + (["response_format"] if spec else [])
    if len(names) > 1:
        raise _wrong(names[0], f"and {names[1]} both ask for a form of the answer; give one")
    if not asked:
        return spec, "response_format"
    name, value = asked[0]
    kind = FORMS.get(name, "")
    if name == "structured_outputs":
        kind, value = next(iter(value.items()))
    return ConstraintSpec(_KINDS[kind], _value(name, kind, value)), name


def _value(name: str, kind: str, value: Any) -> Any:
    """A schema may be given as JSON text, a grammar as GBNF."""
    if kind == "json" and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise _wrong(name, "must be a JSON schema; this text is no JSON") from None
    if kind == "grammar" and isinstance(value, str):
        try:
            return lark_of(value)
        except InputError as error:
            raise _wrong(name, f"cannot be enforced: {error}", "invalid_schema") from None
    return value


def response_form(response_format: Any, name: str = "response_format") -> ConstraintSpec | None:
    """The constraint of response_format, or of text.format (name) of the responses API."""
    if response_format is None:
        return None
    form = response_format if isinstance(response_format, Mapping) else {}
    kind = form.get("type")
    holder = form.get("json_schema") or form
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if kind == "text" and schema is None:
        return None
    if kind == "json_object" and schema is None:
        return ConstraintSpec("json_object")
    if kind == "json_object" and isinstance(schema, Mapping):  # as llama.cpp's clients have it
        return ConstraintSpec("json_schema", {"type": "object", **schema})
    if kind == "json_schema" and isinstance(schema, Mapping):
        return ConstraintSpec("json_schema", dict(schema))
    raise _wrong(name, "must be text, json_object, or json_schema with a schema")


def _wrong(name: str, what: str, code: str = "invalid_request") -> ApiError:
    return ApiError(400, f"{name} {what}", code, field=name)
