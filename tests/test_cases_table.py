"""docs/CASES.md against the tests themselves: a row's files exist and name its cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    (cases, re.findall(r"`(tests/[^`]+)`", rest))
    for cases, rest in re.findall(
        r"^\| ((?:C\d\d ?)+)\|(.*)$", (ROOT / "docs" / "CASES.md").read_text("utf-8"), re.M
    )
]


@pytest.mark.parametrize(("cases", "files"), ROWS, ids=[c.strip() for c, _ in ROWS])
def test_row(cases: str, files: list[str]) -> None:
    assert files
    texts = [(ROOT / name).read_text("utf-8") for name in files]
    for case in cases.split():
        named = re.compile(rf"{case}\b|test_{case.lower()}[a-z]?_")
        assert any(named.search(text) for text in texts), f"{case} is named in none of {files}"


def test_there_are_rows() -> None:
    assert len(ROWS) > 15
