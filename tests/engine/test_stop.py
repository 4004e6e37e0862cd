"""Stop texts against a scan of one character at a time (case C28 and random texts)."""

from __future__ import annotations

import random

import pytest

from strata.engine.stop import StopScanner


def stream(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """What comes out for each piece, and whether a stop text was found."""
    scanner, out = StopScanner(stops), []
    for piece in pieces:
        text, found = scanner.push(piece)
        out.append(text)
        if found:
            return out, True
    return [*out, scanner.finish()], False


def by_character(text: str, stops: list[str]) -> tuple[str, bool]:
    """Grow the text; it ends where the first stop text is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_a_stop_text_over_several_pieces_is_never_shown() -> None:
    # the 'en ' inside 'seven ' begins the stop text and is let go again
    out, found = stream(["se", "ven", " gr", "een", " kett", "les", " boil"], ["en kettles"])
    assert found and "".join(out) == "seven gre"
    assert out == ["s", "ev", "en gr", "e", "", ""]


def test_held_text_comes_out_at_the_end() -> None:
    assert stream(["a ST", "O"], ["STOP"]) == (["a ", "", "STO"], False)


def test_no_stop_texts_hold_nothing_back() -> None:
    assert stream(["a", "", "b"], []) == (["a", "", "b", ""], False)


@pytest.mark.parametrize("seed", range(200))
def test_cutting_the_text_differently_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 40)))
    stops = ["".join(rng.choice("abc") for _ in range(rng.randrange(1, 7))) for _ in range(3)]
    pieces, at = [], 0
    while at < len(text):
        step = rng.randrange(1, 6)
        pieces.append(text[at : at + step])
        at += step
    out, found = stream(pieces, stops)
    assert ("".join(out), found) == by_character(text, stops)
