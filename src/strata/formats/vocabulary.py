"""What a checkpoint says about its tokens, in one form for tokenizer.json and GGUF.

Made by ``tokenizer_json`` and ``tokenizer_gguf``, used by ``tokenizer``. Knows no messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import tokenizers

from strata.formats.added_tokens import AddedTokens

Spelling = Literal["bytes", "sentencepiece"]
"""How a token's name stands for bytes: each letter a byte, or text with U+2581 for a space."""

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens, the two ways between them and text, and what the checkpoint wants done with them.

    first, after_control, after_ordinary: turn text without added tokens into ids, at the begin of a
    text and behind an added token; they differ in whether the text gets a space in front.
    piece: the name of an id, None for a hole. n_vocab: largest id + 1. eos_ids: every id that ends
    an answer. add_bos: text begins with the begin token. strip_space: decoding drops one space at
    the begin. templates: chat templates by name ("default", "tool_use", ...). named: spelled
    special tokens by the name templates use.
    """

    first: tokenizers.Tokenizer
    after_control: tokenizers.Tokenizer
    after_ordinary: tokenizers.Tokenizer
    piece: Callable[[int], str | None]
    n_vocab: int
    added: AddedTokens
    spelling: Spelling
    bos_id: int | None
    eos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    strip_space: bool
    unk_id: int | None = None
    pad_id: int | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


class _ByteOfLetter(dict[int, int]):
    """Code point of a letter of GPT-2's byte alphabet -> its byte; others -> no byte (256)."""

    def __missing__(self, letter: int) -> int:
        return 256


def _byte_alphabet() -> _ByteOfLetter:
    """Bytes that print stand for themselves, the others for U+0100 and on, in order."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = _ByteOfLetter({byte: byte for byte in prints})
    others = [byte for byte in range(256) if byte not in prints]
    table.update({0x100 + i: byte for i, byte in enumerate(others)})
    return table


_ALPHABET = _byte_alphabet()


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """The bytes an ordinary token's name stands for."""
    if spelling == "bytes":
        try:
            return piece.translate(_ALPHABET).encode("latin-1")
        except UnicodeEncodeError:
            return piece.encode("utf-8", "replace")
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")
