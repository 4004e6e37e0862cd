"""Lists of /v1/completions' logprobs: values beside their own tokens, offsets inside the text.
Expectations by hand: the scripted tokenizer's ids are the bytes of the text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from strata.serve.completion_logprobs import CompletionLogprobs
from strata.serve.generation import Piece, Usage
from strata.serve.scripted_text import END, ScriptedTokenizer
from tests.serve.kit import Running

COMPLETIONS = "/v1/completions"
TOKENIZER = ScriptedTokenizer({"answers": [{"write": [" see", " far"]}]})
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Spaced(ScriptedTokenizer):
    """Its texts begin with a space that is not theirs."""

    strip_space = True


def positions(text: str) -> list[int]:
    """The character that each byte of a text belongs to."""
    return [i for i, char in enumerate(text) for _ in char.encode()]


def test_rows_cut_anywhere_are_the_rows_at_once() -> None:
    prompt = list("aü🦜b".encode())
    (see, far) = TOKENIZER.pieces([" see", " far"])
    rows: list[list[Any]] = [[None, []]]
    rows += [[-float(i), [[i, -0.5]]] for i in range(1, len(prompt))]
    written = [[see, " see", -20.0, [[see, -20.0]]], [far, " far", -21.0, [[see, -1.0]]]]
    whole = CompletionLogprobs(TOKENIZER, prompt).of([Piece(0, prompt=rows, tokens=written)])
    assert whole["token_logprobs"] == [None, *(-float(i) for i in range(1, 8)), -20.0, -21.0]
    assert whole["tokens"][-3:] == ["b", " see", " far"] and whole["tokens"][1] == "bytes:\\xc3"
    assert whole["top_logprobs"][-1] == {" see": -1.0, " far": -21.0}
    assert whole["text_offset"] == [*positions("aü🦜b"), 4, 8]
    for cut in range(1, len(prompt)):
        steps = CompletionLogprobs(TOKENIZER, prompt)
        parts = [
            steps.of([piece])
            for piece in (
                Piece(0, prompt=rows[:cut]),
                Piece(0, prompt=rows[cut:], tokens=written[:1]),
                Piece(0, tokens=written[1:]),
            )
        ]
        assert {name: sum((p[name] for p in parts), []) for name in LISTS} == whole


def test_offsets_of_tokens_that_give_no_text() -> None:
    """A begin token stands where the text begins; the space of the tokenizer is no character; half
    a character at the end of the prompt is one."""
    spaced = Spaced({})
    prompt = [256, *b" hi", 0xF0]
    rows: list[list[Any]] = [[None, []], *([-1.0, []] for _ in prompt[1:])]
    token = [ord("!"), "!", -2.0, []]
    made = CompletionLogprobs(spaced, prompt).of([Piece(0, prompt=rows, tokens=[token])])
    assert made["tokens"][0] == END
    assert made["text_offset"] == [0, 0, 0, 1, 2, 3]
    alone = CompletionLogprobs(spaced, []).of([Piece(0, tokens=[[32, " ", -1.0, []], token])])
    assert alone["text_offset"] == [0, 1]  # continues a text: the space is one of its characters


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_streams_tell_the_same_rows(served: Running, max_tokens: int) -> None:
    body = {"prompt": "Zü🦜 日 cat", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    choice = served.post(COMPLETIONS, body).json()["choices"][0]
    rows = choice["logprobs"]
    n = len("Zü🦜 日 cat")
    assert rows["text_offset"] == [*positions("Zü🦜 日 cat"), *range(n, n + max_tokens)]
    for token, at in zip(rows["tokens"], rows["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, at)
    chunks = served.chunks(COMPLETIONS, body)
    parts = [c["choices"][0] for c in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert {name: sum((p["logprobs"][name] for p in parts), []) for name in LISTS} == rows


def test_what_a_request_read_itself_was_not_cached(served: Running) -> None:
    """Scoring reads the prompt afresh, then the answer goes on from there: nothing was reused."""
    body = {"prompt": "kettle", "max_tokens": 2, "echo": True, "logprobs": 1}
    hits = served.metric("vllm:prefix_cache_hits_total")
    answer = served.post(COMPLETIONS, body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["strata"]["answers"][0]["reused_tokens"] == 0
    assert served.metric("vllm:prefix_cache_hits_total") == hits


def test_a_prompt_counts_once_with_what_was_kept_of_it() -> None:
    """Two prompts of two answers each: the second answer goes on from the first one's prompt."""
    usage = Usage(prompt_tokens=20)
    for reused, first in ((4, True), (10, False), (6, True), (10, False)):
        usage.add({"reused_tokens": reused}, 1, 0, first=first)
    assert (usage.reused_tokens, len(usage.reports)) == (10, 4)


def test_the_request_of_an_evaluation_harness(served: Running) -> None:
    """The body that lm-evaluation-harness sends for a likelihood (token ids, echo, one token more)
    and how it reads the answer: the values from the context's length to the last but one, and
    whether each was the likeliest. The scripted engine calls every token of a prompt equally
    likely, so each value is -log(vocabulary)."""
    context, continuation = list(b"the pot "), list(b"boils")
    body = {
        "prompt": [context + continuation], "max_tokens": 1, "logprobs": 1, "echo": True,
        "temperature": 0, "seed": 1234, "model": "scripted",
    }  # fmt: skip
    choices = served.post("/v1/completions", body).json()["choices"]
    [choice] = sorted(choices, key=lambda choice: choice["index"])
    values = choice["logprobs"]["token_logprobs"][len(context) : -1]
    best = choice["logprobs"]["top_logprobs"][len(context) : -1]
    assert len(values) == len(best) == len(continuation)
    vocabulary = served.server.link.health.info["vocabulary"]
    assert all(abs(value + math.log(vocabulary)) < 1e-6 for value in values)
    assert all(value == max(top.values()) for value, top in zip(values, best, strict=True))
