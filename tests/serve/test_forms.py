"""What response_format asks for. Expectations: the documents of OpenAI and llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

from strata.serve.errors import ApiError
from strata.serve.forms import response_form
from strata.serve.text.specs import ConstraintSpec

ONE = {"properties": {"q": {"const": 1}}, "required": ["q"]}
OBJECT = {"type": "object", **ONE}


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ConstraintSpec("json_object")),
        ({"type": "json_object", "schema": None}, ConstraintSpec("json_object")),
        ({"type": "json_object", "schema": ONE}, ConstraintSpec("json_schema", OBJECT)),
        ({"type": "json_object", "schema": {}}, ConstraintSpec("json_schema", {"type": "object"})),
        ({"type": "json_schema", "schema": ONE}, ConstraintSpec("json_schema", ONE)),
        ({"type": "json_schema", "json_schema": {"schema": ONE}},
         ConstraintSpec("json_schema", ONE)),
    ],
)  # fmt: skip
def test_c33_a_schema_is_never_dropped(form: Any, spec: ConstraintSpec | None) -> None:
    assert response_form(form) == spec


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": "q"},
        {"type": "text", "schema": ONE},
        {"type": "json_schema"},
        {"schema": ONE},
        "json_object",
    ],
)
def test_c33_what_cannot_be_understood_is_refused(form: Any) -> None:
    with pytest.raises(ApiError, match="response_format must be") as caught:
        response_form(form)
    assert caught.value.status == 400
