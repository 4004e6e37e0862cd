"""A folder for conversations that cannot be had is an error of the setting that names it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.core.errors import SettingError
from strata.engine import remember


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(remember, "identity", lambda engine, path: {})
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(park_dir=str(tmp_path / "file" / "kept")), state=None
    )
    with pytest.raises(SettingError, match="--park-dir .*Not a directory"):
        remember.conversations(engine, tmp_path)
