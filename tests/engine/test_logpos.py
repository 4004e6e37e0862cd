"""Log-probability lines against a softmax written out here."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from strata.core.errors import InputError, NumericsError
from strata.core.settings import Settings
from strata.engine.logpos import LogposWriter, extra_token, logpos_line

ROW = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32)) + 5


def test_fields_of_a_line() -> None:
    fields = logpos_line(12, ROW, 3, top=2, extra=1).split("\t")
    logp = [math.log(x) for x in (0.1, 0.4, 0.2, 0.3)]
    assert fields[:2] == ["12", "3"]
    assert fields[3] == "1" and fields[5] == "0"
    for text, value in ((fields[2], logp[3]), (fields[4], logp[1]), (fields[6], logp[1])):
        assert text == f"{float(text):.9f}"
        assert float(text) == pytest.approx(value, abs=1e-6)
    # without token 1 the target has 0.3 of 0.6
    assert float(fields[7]) == pytest.approx(math.log(0.5), abs=1e-6)
    assert [item.split(":")[0] for item in fields[8:]] == ["1", "3"]
    assert float(fields[9].split(":")[1]) == pytest.approx(logp[3], abs=1e-6)
    assert len(fields[9].split(".")[1]) == 6


def test_what_does_not_exist_is_nan() -> None:
    last = logpos_line(5, ROW).split("\t")
    assert last[1:3] == ["-1", "nan"] and last[5:] == ["0", "nan", "nan"]
    no_extra = logpos_line(5, ROW, 1).split("\t")
    assert no_extra[5:] == ["1", "nan", "nan"]
    target_is_extra = logpos_line(5, ROW, 2, extra=2).split("\t")
    assert target_is_extra[6] != "nan" and target_is_extra[7] == "nan"


def test_renormalizing_survives_a_certain_extra() -> None:
    row = np.array([0.0, 200.0, 0.0], np.float64)
    assert float(logpos_line(0, row, 0, extra=1).split("\t")[7]) == pytest.approx(math.log(0.5))


def test_broken_rows_are_an_error() -> None:
    with pytest.raises(NumericsError, match="position 7"):
        logpos_line(7, np.array([0, np.nan], np.float32))


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out.tsv"
    for position in (0, 1):
        with LogposWriter(path, top=4) as write:
            write(position, ROW, 2)
    lines = path.read_text().splitlines()
    assert lines == [logpos_line(i, ROW, 2, top=4) for i in (0, 1)]
    with pytest.raises(InputError, match="cannot append"):
        LogposWriter(tmp_path / "no" / "folder")


def test_extra_token_of_settings() -> None:
    assert extra_token(Settings(), (9, 8), 50) == 9
    assert extra_token(Settings(), (), 50) == -1
    assert extra_token(Settings(logpos_extra=3), (9,), 50) == 3
    with pytest.raises(InputError, match="--logpos-extra 50 is outside"):
        extra_token(Settings(logpos_extra=50), (9,), 50)
