"""Answers held to a form, on the demo model: what is complete parses and validates.

Expectations come from json and jsonschema; masks inside windows from the same answers decoded one
token at a time.
"""

from __future__ import annotations

import gc
import json
import re
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.tokenizer_samples import tiny_json

import strata
from strata.core.errors import EngineError, InputError, UnsupportedError
from strata.engine import constraint as module
from strata.engine.constraint import (
    GrammarConstraint,
    TokenTable,
    prepare,
    require_llguidance,
    table_of,
)
from strata.engine.draft import ScriptedDrafter
from strata.engine.model import Model
from strata.engine.session import Session
from strata.engine.window_output import WindowOutput, output_of
from strata.formats.detokenize import StreamDecoder
from strata.serve.text.constraints import check_constraint, constraint_for
from strata.serve.text.specs import ConstraintSpec

DEMO = Path(__file__).resolve().parents[2] / "models" / "tiny-flash-next-Q8_0.gguf"
PROMPT = "The answer in JSON:"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with strata.load(DEMO, device="cpu", workers=1, context=512) as loaded:
        yield loaded


class Dice:
    """An engine whose logits are random but depend on the tokens alone: a fast stand-in."""

    mode = "exact"

    def __init__(self, n_vocab: int, seed: int) -> None:
        self.n_vocab, self.context_tokens = n_vocab, 512
        self.tokens: list[int] = []
        self._seed = seed
        self._window: list[int] = []

    def reset(self) -> None:
        self.tokens = []

    def _row(self, tokens: list[int]) -> np.ndarray:
        key = zlib.crc32(np.array([self._seed, *tokens]).tobytes())
        return np.random.default_rng(key).normal(scale=2, size=self.n_vocab).astype(np.float32)

    def read_prompt(self, tokens: list[int], progress: Any = None) -> np.ndarray:
        self.tokens += tokens
        return self._row(self.tokens)

    def verify(self, tokens: list[int]) -> WindowOutput:
        self._window = list(tokens)
        rows = [self._row(self.tokens + self._window[: i + 1]) for i in range(len(tokens))]
        return output_of(rows)

    def commit(self, n: int) -> None:
        self.tokens += self._window[:n]


def answer(
    model: Model,
    spec: ConstraintSpec,
    window: int = 1,
    script: Any = (),
    *,
    engine: Any = None,
    **sampling: Any,
) -> tuple[str, str]:
    """(text, finish) of the model's engine (or another with its vocabulary), windows of this size
    with scripted drafts."""
    tokenizer = model.tokenizer
    prompt = tokenizer.encode(PROMPT)
    session = Session(
        engine or model.engine,
        ScriptedDrafter([*prompt, *script]),
        lambda: StreamDecoder(tokenizer),
        model.eos_tokens,
        window,
    )
    session.forget()
    asked = model.settings.for_request(**{"max_tokens": 24, "temperature": 1.0, **sampling})
    events = list(session.answer(prompt, asked, constraint=constraint_for(spec, tokenizer)))
    return "".join(event.text for event in events), events[-1].finish or ""


def draw_ids(model: Model, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_bos=False)


WORDS = st.sampled_from(["a", "name", "ü", "b c", 'q"t'])
LEAVES = st.one_of(
    st.builds(lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n},
              st.integers(-9, 99), st.integers(0, 60)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda a, n: {"type": "string", "minLength": a, "maxLength": a + n},
              st.integers(0, 2), st.integers(0, 3)),
    st.builds(lambda v: {"enum": v}, st.lists(st.one_of(WORDS, st.integers(0, 5), st.none()),
                                              min_size=1, max_size=3)),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{1,3}$"}, {"const": {"k": [1, "x"]}}]),
)  # fmt: skip


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(WORDS, inner, max_size=2).map(
        lambda p: {
            "type": "object", "properties": p, "required": list(p), "additionalProperties": False
        }
    )  # fmt: skip


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda s, a, n: {"type": "array", "items": s, "minItems": a, "maxItems": a + n},
        inner, st.integers(0, 1), st.integers(0, 2),
    )  # fmt: skip


SCHEMAS = st.recursive(LEAVES, lambda s: st.one_of(objects(s), arrays(s), st.builds(
    lambda a, b: {"anyOf": [a, b]}, s, s)), max_leaves=4)  # fmt: skip


def check(model: Model, schema: dict[str, Any], seed: int, engine: Any = None) -> bool:
    """One answer, alone and in windows with good and with half-wrong drafts; whether it ended."""
    spec = ConstraintSpec("json_schema", schema)
    check_constraint(spec)
    text, finish = answer(model, spec, seed=seed, engine=engine)
    if finish == "stop":
        jsonschema.validate(json.loads(text), schema)
    else:
        assert finish == "length"
    ids = draw_ids(model, text)
    for drafts in (ids, [*ids[:3], *ids[4:], *ids]):
        assert answer(model, spec, 4, drafts, seed=seed, engine=engine) == (text, finish)
    return finish == "stop"


@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_c33_completed_answers_validate_and_windows_change_nothing(
    model: Model, schema: dict[str, Any], seed: int
) -> None:
    check(model, schema, seed, Dice(model.engine.n_vocab, seed))


@settings(max_examples=3, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_the_same_on_the_demo_model(model: Model, schema: dict[str, Any], seed: int) -> None:
    check(model, schema, seed)


def test_c33_fifty_answers_validate_or_are_cut(model: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    spec = ConstraintSpec("json_schema", schema)
    spaces = [
        t for t in range(model.tokenizer.n_vocab) if not model.tokenizer.token_bytes(t).strip()
    ]
    bias = dict.fromkeys(spaces, -9.0)
    ended = 0
    for seed in range(50):
        engine = Dice(model.engine.n_vocab, seed)
        text, finish = answer(model, spec, seed=seed, engine=engine, logit_bias=bias)
        assert finish in ("stop", "length")
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended >= 25


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (ConstraintSpec("regex", "[0-9]{2}/[a-f]{3}"), "[0-9]{2}/[a-f]{3}"),
        (ConstraintSpec("choice", ["yes", "no / maybe"]), "yes|no / maybe"),
        (ConstraintSpec("grammar", 'start: "<" n ">"\nn: /[1-9]/ ("," /[1-9]/)~2'), "<.,.,.>"),
        (ConstraintSpec("regex", "[0-9]", "|"), r"(?s)[^|]*\|[\n ]{0,3}[0-9]"),
    ],
)
def test_other_forms(model: Model, spec: ConstraintSpec, pattern: str) -> None:
    check_constraint(spec)
    bias = {draw_ids(model, "|")[0]: 12.0}
    text, finish = answer(model, spec, seed=5, logit_bias=bias)
    assert finish == "stop" and re.fullmatch(pattern, text)


def test_json_object(model: Model) -> None:
    bias = {draw_ids(model, "}")[0]: 15.0}
    text, finish = answer(model, ConstraintSpec("json_object"), seed=1, logit_bias=bias)
    assert finish == "stop" and isinstance(json.loads(text), dict)


def test_drafts_outside_the_grammar_are_not_run(model: Model) -> None:
    made = constraint_for(ConstraintSpec("regex", "[ab]{2}1c"), model.tokenizer)
    n_vocab, ends = model.engine.n_vocab, model.tokenizer.eos_ids
    a, b, one, c = (draw_ids(model, letter)[0] for letter in "ab1c")
    assert made.plan([a, b, c, one]) == [a, b]
    made.mask(row := np.zeros(n_vocab))
    assert row[a] == row[b] == 0 and row[one] == row[ends[0]] == -np.inf
    made.accept(b)  # not as drafted: the masks computed ahead do not count
    made.mask(row := np.zeros(n_vocab))
    assert row[a] == 0 and row[c] == -np.inf
    made.accept(a)
    assert made.plan([one, c, c]) == [one, c]
    for token in (one, c):
        made.mask(row := np.zeros(n_vocab))
        assert np.flatnonzero(row == 0).tolist() == [token]
        made.accept(token)
    made.mask(row := np.zeros(n_vocab))
    assert {int(i) for i in np.flatnonzero(row == 0)} == set(ends)
    with pytest.raises(EngineError, match="does not admit"):
        made.accept(a)
    made.accept(ends[0])
    assert made.ended and made.plan([a]) == []


def test_a_table_from_tokenizer_json() -> None:
    tokenizer = tiny_json()
    made = constraint_for(ConstraintSpec("regex", "a+"), tokenizer)
    row = np.zeros(tokenizer.n_vocab + 3)
    made.mask(row)
    allowed = [tokenizer.token_bytes(int(i)) for i in np.flatnonzero(row == 0)]
    assert b"a" in allowed and all(set(text) == set(b"a") for text in allowed)
    assert table_of(tokenizer) is table_of(tokenizer)
    gone = weakref.ref(tokenizer)
    del tokenizer, made
    gc.collect()
    assert gone() is None


def test_a_table_made_beforehand() -> None:
    tokenizer = tiny_json()
    prepare(tokenizer)
    assert b"a" in [tokenizer.token_bytes(i) for i in range(table_of(tokenizer).n_vocab)]


class NoEnd:
    """A vocabulary without an end token."""

    n_vocab = 2
    eos_ids = ()

    def token_bytes(self, token: int) -> bytes:
        return b"ab"[token : token + 1]

    def is_control(self, token: int) -> bool:
        return False

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return []


def test_refusals(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    with pytest.raises(UnsupportedError, match="ends an answer"):
        TokenTable(NoEnd())
    with pytest.raises(InputError, match="cannot be enforced"):
        GrammarConstraint(
            '{"grammars": [{"lark_grammar": "start: /(/"}]}', table_of(model.tokenizer)
        )
    monkeypatch.setattr(module, "llguidance", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        require_llguidance()
