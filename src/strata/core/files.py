"""Files that a call names, looked at before any work: can they be written, are they text."""

from __future__ import annotations

import tempfile
from pathlib import Path

from strata.core.errors import InputError, SettingError


def require_file(flag: str, path: Path) -> None:
    """SettingError when a file cannot be written; what is in it stays, and none is left behind."""
    if not path.absolute().parent.is_dir():
        raise SettingError(f"{flag} {path}: its folder does not exist; create it first")
    try:
        there = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise SettingError(
            f"{flag} {path}: cannot be written ({error.strerror or error}); name another file"
        ) from None


def require_folder(flag: str, folder: Path, what: str) -> None:
    """SettingError when nothing can be kept in a folder; it is made when it is not there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingError(
            f"{flag} {folder}: {what} cannot be kept there ({error.strerror or error}); name a "
            f"folder that can be written"
        ) from None


def require_text(flag: str, path: Path) -> None:
    """InputError when a file is no UTF-8 text with something in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{flag} {path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror or error}") from None
    if not text:
        raise InputError(f"{flag} {path} is empty; at least one token is needed")
