"""Token ids back to text, piece by piece, never showing half a character. Knows no stop rules.

A character may be spread over several tokens. ``StreamDecoder`` gives out text as soon as it is
certain: bytes that may still become a character are held back, bytes that cannot be text become
U+FFFD at once (so later text keeps flowing), and what is unfinished at the end becomes U+FFFD in
``finish``. Invariant: the joined pieces equal decoding all bytes at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What decoding needs of a tokenizer."""

    @property
    def strip_space(self) -> bool:
        """Whether the text's first space belongs to the tokenizer, not to the text."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""

    def is_control(self, token: int) -> bool:
        """Whether the token is no text (begin, end, roles)."""


class StreamDecoder:
    """Decodes one text. ``push`` each id in order, then ``finish`` once.

    skip_special: control tokens give no text (else their spelling). continues: the ids continue a
    text, so a space at the begin is kept.
    """

    def __init__(
        self, tokenizer: TokenBytes, *, skip_special: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._drop_space = tokenizer.strip_space and not continues
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        if self._tokenizer.is_control(token) and self._skip_special:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._bytes.decode(data)

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was cut, else empty. Ends the text."""
        return self._bytes.decode(b"", final=True)


def decode(
    tokenizer: TokenBytes,
    tokens: Iterable[int],
    *,
    skip_special: bool = True,
    continues: bool = False,
) -> str:
    """The text of all ``tokens`` at once: exactly the joined pieces of a ``StreamDecoder``."""
    stream = StreamDecoder(tokenizer, skip_special=skip_special, continues=continues)
    return "".join([*map(stream.push, tokens), stream.finish()])
