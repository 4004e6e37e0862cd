"""Arguments that an answer's end cut. Expectations: by hand, and jiter, the parser that the
official Anthropic client reads streams with."""

from __future__ import annotations

import json

import pytest

from strata.serve.text.json_pieces import cut_object

WHOLE = json.dumps(
    {"city": 'Ro\\me, {"a": [', "n": [1, -2.5e3, [True, None]], "o": {"k": {}, "é": "\n"}, "z": []}
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"city": "Rome\\n</p', {}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": {"b": "x', {"a": {}}),
        ('{"a": ["x", "y', {"a": ["x"]}),
        ('{"a": "x\\', {}),
        ('{"a": tr', {}),
        ("{}", {}),
        ("[1", None),
        ("Rome", None),
        ("", None),
        ('{"a": 1}}', None),
        ('{"a": [1}', None),
        ("{Rome, Paris", None),
    ],
)
def test_what_is_complete_stays(text: str, value: object) -> None:
    assert cut_object(text) == value


def test_agrees_with_the_official_clients_parser() -> None:
    jiter = pytest.importorskip("jiter", reason="the official clients are not installed")
    assert cut_object(WHOLE) == json.loads(WHOLE)
    for n in range(1, len(WHOLE)):
        expected = jiter.from_json(WHOLE[:n].encode(), partial_mode=True)
        assert cut_object(WHOLE[:n]) == expected, WHOLE[:n]
