"""The bar that is drawn while a model loads, on a pretended terminal."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from strata import cli_screen


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_says_bytes_and_time_left(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """768 of 1024 MiB after some time: phase, both numbers, a time; nothing in a pipe."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, legacy_windows=False)
    monkeypatch.setattr(cli_screen, "Console", lambda stderr: console)
    mib = 1 << 20
    with cli_screen._progress_bar() as update:
        if not terminal:
            assert update is None
            return
        for done in (0, 256, 512, 768):
            update("experts", done * mib, 1024 * mib)
            time.sleep(0.02)
        update("pack", 0, 10 * mib)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert re.search(r"loading experts .* 0\.8/1\.0 GiB +0:00:0\d", plain)
    assert re.search(r"loading pack .* 0\.0/10\.0 +MiB +-:--:--", plain)
