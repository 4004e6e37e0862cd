"""The log writes plain lines where it was sent, each warning once, and nothing unless asked."""

from __future__ import annotations

import io

import pytest

from strata.core.log import LOG, log_to


def test_nothing_is_written_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    LOG.warning("unheard")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("quiet", [False, True])
def test_lines_warnings_and_quiet(quiet: bool) -> None:
    stream = io.StringIO()
    handler = log_to(stream, quiet=quiet)
    try:
        for _ in range(2):
            LOG.info("two")
            LOG.warning("once")
    finally:
        LOG.removeHandler(handler)
    expected = ["warning: once"] if quiet else ["two", "warning: once", "two"]
    assert stream.getvalue().splitlines() == expected
