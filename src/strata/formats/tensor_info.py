"""Where one tensor lies and how its numbers are stored. Knows no file format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.core.errors import FormatError
from strata.formats.text import counted, quoted
from strata.formats.weight_types import TYPES, WeightType

_MAX_ELEMENTS = 1 << 56


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    shape: slowest axis first (a GGUF's ne reversed). offset: absolute, in bytes from the start of
    ``path``. n_bytes: 0 when the type is one we cannot size (listings only; such files do not open
    for loading).
    """

    name: str
    shape: tuple[int, ...]
    type: WeightType
    path: Path
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """Number of stored numbers."""
        return math.prod(self.shape)

    @property
    def n_cols(self) -> int:
        """Width of a row: the fastest axis; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def n_rows(self) -> int:
        """Product of all axes but the fastest."""
        return math.prod(self.shape[:-1])

    @property
    def readable(self) -> bool:
        """Whether the type is in the table of weight types, i.e. the tensor can be loaded."""
        return TYPES.get(self.type.name) is self.type


def shape_is_credible(shape: tuple[int, ...]) -> bool:
    """Whether numpy can hold such a shape at all; an axis of 0 must not hide absurd other axes."""
    return math.prod(max(axis, 1) for axis in shape) <= _MAX_ELEMENTS


def check_inside(
    path: Path, size_bytes: int, tensors: Sequence[TensorInfo], alignment: int = 1
) -> None:
    """Every tensor (sorted by offset) ends inside its file; FormatError names the first outside.

    alignment: what a whole file's end is padded to, for the count of missing bytes.
    """
    past = [t for t in tensors if t.offset + t.n_bytes > size_bytes]
    if not past:
        return
    first = past[0]
    end = max(t.offset + t.n_bytes for t in past)
    missing, padding = end - size_bytes, -end % alignment
    padded = f" ({missing + padding} with the padding behind it)" if padding else ""
    raise FormatError(
        f"{path} is cut short: {missing} bytes are missing{padded}; tensor {quoted(first.name)} is "
        f"the first that runs past the end (bytes {first.offset} to {first.offset + first.n_bytes} "
        f"of a file of {size_bytes}; {counted(len(past), 'tensor')} affected); download it again"
    )
