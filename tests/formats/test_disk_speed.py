"""Direct reads of files: bytes over time on a clock of our own, refusals in words."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from strata.formats.disk_speed import PIECE_BYTES, REQUESTS, Span, disk_speed

needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs direct reads")


@pytest.fixture
def span(tmp_path: Path) -> Span:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(5 * PIECE_BYTES))
    return Span(path, 1000, 4 * PIECE_BYTES)


@needs_direct
def test_bytes_over_time(span: Span) -> None:
    """Time jumps by 10 s after the first look: every request ends after one piece of 1 MiB."""
    looks = itertools.chain([5.0], itertools.repeat(15.0))
    found = disk_speed([span], 1.0, lambda: next(looks))
    if isinstance(found, str):
        pytest.skip(found)  # file systems without direct reads
    assert found == REQUESTS * PIECE_BYTES / 10


@needs_direct
def test_what_cannot_be_read_is_said(span: Span, tmp_path: Path) -> None:
    assert disk_speed([Span(span.path, 0, PIECE_BYTES)]) == "no matrix is large enough"
    assert disk_speed([]) == "no matrix is large enough"
    missing = disk_speed([Span(tmp_path / "none", 0, 4 * PIECE_BYTES)])
    assert missing == "direct reads are refused here (No such file or directory)"
