"""Vocabularies and texts for the tokenizer tests; the texts are our own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from strata.formats.tokenizer import Tokenizer
from strata.formats.tokenizer_gguf import vocabulary_from_gguf
from strata.formats.tokenizer_json import vocabulary_from_json
from strata.formats.vocabulary import Vocabulary

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny_tokenizer"
"""A real vocabulary of 6,144 byte-level BPE tokens with Qwen 2's rule of cutting words."""

PRETOKENS = json.loads((DATA / "pretokens.json").read_text(encoding="utf-8"))
TEXTS: list[str] = PRETOKENS["texts"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def tiny_files() -> dict[str, Path]:
    """The tiny tokenizer's files by name."""
    return {path.name: path for path in TINY.iterdir()}


def tiny_json() -> Tokenizer:
    """The tiny tokenizer as ours, from its tokenizer.json."""
    return Tokenizer(vocabulary_from_json(tiny_files()))


def tiny_reference() -> HfTokenizer:
    """The tiny tokenizer as the tokenizers library itself reads it."""
    return HfTokenizer.from_file(str(TINY / "tokenizer.json"))


def gguf_keys(tokenizer_json: Path, pre: str, **more: Any) -> dict[str, Any]:
    """GGUF metadata with the vocabulary of a tokenizer.json, as converters write it.

    more: further keys under tokenizer.ggml, or ``chat_template``.
    """
    described = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocab, added = described["model"]["vocab"], described["added_tokens"]
    n_tokens = 1 + max([*vocab.values(), *(token["id"] for token in added)])
    tokens = [f"[PAD{i}]" for i in range(n_tokens)]
    types = [UNUSED] * n_tokens
    for text, i in vocab.items():
        tokens[i], types[i] = text, NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = described["model"]["merges"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    }
    if template := more.pop("chat_template", None):
        keys["tokenizer.chat_template"] = template
    return keys | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


@cache
def tiny_vocabulary() -> Vocabulary:
    """The tiny tokenizer's vocabulary from GGUF metadata."""
    return vocabulary_from_gguf(gguf_keys(TINY / "tokenizer.json", "qwen2", eos_token_id=2))


def tiny_gguf(template: str | None = None) -> Tokenizer:
    """The tiny tokenizer as ours, from GGUF metadata, with this chat template."""
    templates = {} if template is None else {"default": template}
    return Tokenizer(replace(tiny_vocabulary(), templates=templates))


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The control tokens among ``ids``."""
    return [i for i in ids if tokenizer.is_control(i)]
