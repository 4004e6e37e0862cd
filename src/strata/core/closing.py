"""Things that are closed at the end of a ``with``."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A class with ``close`` as a context manager of itself."""

    def close(self) -> None:
        """Let go of what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
