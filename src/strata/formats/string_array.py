"""An array of length-prefixed strings inside a mapping, decoded only when asked for.

Vocabularies hold hundreds of thousands of strings that most readers of a file never look at, so
opening a file only finds where each string begins. Bytes that are not UTF-8 survive: they decode to
surrogate escapes, and ``to_bytes`` gives them untouched.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

_U64 = struct.Struct("<Q")
_PREFIX_BYTES = 8


class StringArray(Sequence[str]):
    """Strings that lie one after another in ``buffer``, each behind its u64 length.

    ``positions``: where each string's length prefix begins, plus the end of the last string.
    """

    def __init__(self, buffer: memoryview, positions: array[int]) -> None:
        self._buffer = buffer
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions) - 1

    def bytes_at(self, i: int) -> bytes:
        """String i as stored; negative i counts from the end (IndexError outside)."""
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"string {i} of {n}")
        i %= n
        return bytes(self._buffer[self._positions[i] + _PREFIX_BYTES : self._positions[i + 1]])

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.bytes_at(i).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"

    def to_bytes(self) -> list[bytes]:
        """All strings as stored, in order."""
        base = self._positions[0]
        # slicing bytes is several times faster than slicing the mapping string by string
        blob = bytes(self._buffer[base : self._positions[-1]])
        cuts = [position - base for position in self._positions]
        return [blob[a + _PREFIX_BYTES : b] for a, b in pairwise(cuts)]

    def tolist(self) -> list[str]:
        """All strings decoded, in order; invalid bytes become surrogate escapes."""
        return [string.decode("utf-8", "surrogateescape") for string in self.to_bytes()]


def scan_strings(buffer: mmap.mmap, start: int, count: int, end: int) -> array[int] | None:
    """Positions (see StringArray) of ``count`` strings from ``start`` on; None past ``end``."""
    positions = array("Q")
    append, length_at = positions.append, _U64.unpack_from
    position = start
    for _ in range(count):
        if position + _PREFIX_BYTES > end:
            return None
        append(position)
        position += _PREFIX_BYTES + length_at(buffer, position)[0]
    if position > end:
        return None
    append(position)
    return positions
