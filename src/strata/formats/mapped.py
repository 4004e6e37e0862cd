"""One file mapped read-only into memory. Knows nothing of its contents."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import FormatError, InputError


class MappedFile:
    """A read-only mapping of a whole regular file; bytes are paged in by the system when touched.

    Raises FormatError for an empty file and InputError when the system refuses to open it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as stream:
                self.size = os.fstat(stream.fileno()).st_size
                if self.size == 0:
                    raise FormatError(f"{path} is empty (0 bytes); download it again")
                self._map: mmap.mmap | None = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapping itself, for readers that unpack from it."""
        if self._map is None:
            raise InputError(f"{self.path} is closed; open the checkpoint again")
        return self._map

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Bytes [offset, offset + n_bytes) as a read-only uint8 view, no copy."""
        if self._bytes is None:
            raise InputError(f"{self.path} is closed; open the checkpoint again")
        assert offset >= 0 and offset + n_bytes <= self.size, "offsets are checked on open"
        return self._bytes[offset : offset + n_bytes]

    def close(self) -> None:
        """Give the mapping up; views handed out stay valid and the last releases the memory."""
        if self._map is None:
            return
        self._bytes = None
        mapping, self._map = self._map, None
        try:
            mapping.close()
        except BufferError:
            # somebody still holds a view: the mapping is freed together with the last one
            return
