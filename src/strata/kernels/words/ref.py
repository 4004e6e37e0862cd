"""Words as the host sees them: plain aligned 32-bit loads and stores, which x86-64 and the mapping
keep in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD_BYTES = 64
RELEASED = 0xFFFFFFFF


def raise_word(words: npt.NDArray[np.uint32], index: int, value: int) -> None:
    """Set word ``index`` of a uint32 view with 16 entries a word; it may only grow."""
    at = index * WORD_BYTES // 4
    assert value >= int(words[at]), f"word {index} would fall from {int(words[at])} to {value}"
    words[at] = value


def read_word(words: npt.NDArray[np.uint32], index: int) -> int:
    """Value of word ``index``."""
    return int(words[index * WORD_BYTES // 4])
