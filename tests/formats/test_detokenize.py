"""Streaming text (C27): no half characters, and the joined pieces equal decoding at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.tokenizer_samples import TEXTS, tiny_json

from strata.formats.detokenize import StreamDecoder, decode

EMOJI = "🦄".encode()
CONTROL = 99


@dataclass
class Scripted:
    """A tokenizer whose tokens are given byte strings; 99 is a control token."""

    tokens: list[bytes]
    strip_space: bool = False

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token."""
        return b"<|end|>" if token == CONTROL else self.tokens[token]

    def is_control(self, token: int) -> bool:
        """Whether it is the control token."""
        return token == CONTROL


def pushed(tokens: list[bytes], *, strip_space: bool = False, **options: bool) -> list[str]:
    """The pieces a stream gives for these tokens, the rest last."""
    stream = StreamDecoder(Scripted(tokens, strip_space), **options)
    return [*map(stream.push, range(len(tokens))), stream.finish()]


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3)])
def test_emoji_in_two_three_and_four_tokens(cuts: tuple[int, ...]) -> None:
    # C27. Expectation: nothing until the character is whole, then the character, then the rest.
    ends = [0, *cuts, 4]
    parts = [EMOJI[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    pieces = pushed([b"a", *parts, b"b"])
    assert pieces == ["a", *[""] * (len(parts) - 1), "🦄", "b", ""]


def test_text_goes_on_after_invalid_bytes() -> None:
    # C27. Expectation: Python's decoder with U+FFFD; the stream does not freeze on a bad byte.
    tokens = [b"a", b"\xff", b"b", EMOJI[:2], b"c", b"\x80", b"d"]
    pieces = pushed(tokens)
    assert "".join(pieces) == b"".join(tokens).decode(errors="replace") == "a\ufffdb\ufffdc\ufffdd"
    assert pieces[2] == "b" and pieces[4] == "\ufffdc"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_cut_in_mid_character_is_flushed_at_the_end(length: int) -> None:
    # C27. Expectation: one U+FFFD for the unfinished character, in both ways of decoding.
    tokens = [b"x", EMOJI[:length]]
    assert pushed(tokens) == ["x", "", "\ufffd"]
    assert decode(Scripted(tokens), range(2)) == "x\ufffd"


@given(st.lists(st.binary(max_size=5), max_size=12), st.booleans())
def test_pieces_equal_the_whole(tokens: list[bytes], strip: bool) -> None:
    # Expectation: Python's own decoding of all bytes (less one space where the tokenizer adds it).
    data = b"".join(tokens)
    expected = (data.removeprefix(b" ") if strip else data).decode(errors="replace")
    assert "".join(pushed(tokens, strip_space=strip)) == expected
    assert decode(Scripted(tokens, strip), range(len(tokens))) == expected


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(0, 2**32))
def test_valid_text_never_shows_a_replacement(text: str, seed: int) -> None:
    # Expectation: the text itself; U+FFFD only where the text has one.
    data, cut = text.encode(), random.Random(seed)
    tokens = []
    while data:
        size = cut.randint(1, 5)
        tokens.append(data[:size])
        data = data[size:]
    pieces = pushed(tokens)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_control_tokens_and_first_space() -> None:
    # Expectation: skipped or spelled as asked; only the first space of the text is dropped, also
    # behind a control token, and none where the ids continue a text.
    tokenizer = Scripted([b" a", b" b"], strip_space=True)
    assert decode(tokenizer, [CONTROL, 0, 1, CONTROL]) == "a b"
    assert decode(tokenizer, [0, CONTROL], skip_special=False) == "a<|end|>"
    assert decode(tokenizer, [0, 1], continues=True) == " a b"


@pytest.mark.parametrize("text", TEXTS)
def test_real_vocabulary(text: str) -> None:
    # Expectation: what was encoded (composed, as this vocabulary's tokenizer.json asks).
    tokenizer = tiny_json()
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
