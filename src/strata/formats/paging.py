"""Hints to the system about mapped memory. Hints only: where they fail nothing changes."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def will_need(view: NDArray[np.uint8]) -> None:
    """Ask for the pages under a contiguous view to be read now, in the background."""
    advise = _madvise()
    if advise is None or view.nbytes == 0:
        return
    start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = view.ctypes.data + view.nbytes
    advise(start, end - start, mmap.MADV_WILLNEED)


@cache
def _madvise() -> Any:
    """The C library's madvise, or None where there is none."""
    if not sys.platform.startswith(("linux", "darwin")):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
