"""One logger for the whole package. Silent until a program asks for it; the library itself
configures nothing.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOG = logging.getLogger("strata")
LOG.addHandler(logging.NullHandler())


class _Once(logging.Filter):
    """Lets a warning through once; the same text again is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        fresh = text not in self._seen
        self._seen.add(text)
        return fresh


def log_to(stream: TextIO | None = None, *, quiet: bool = False) -> logging.Handler:
    """Write the log as plain lines (warnings marked) to a stream, default stderr. quiet: warnings
    and errors only.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Plain())
    handler.addFilter(_Once())
    LOG.addHandler(handler)
    LOG.setLevel(logging.WARNING if quiet else logging.INFO)
    return handler


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"
