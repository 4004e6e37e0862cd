"""Hints to the system about mapped memory, and what of it is in RAM. Where they fail nothing
changes."""

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
    will_need_at(view.ctypes.data, view.nbytes)


def will_need_at(address: int, n_bytes: int) -> None:
    """Ask for the pages under these bytes to be read now, in the background."""
    advise = _madvise()
    if advise is None or n_bytes == 0:
        return
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, address + n_bytes - start, mmap.MADV_WILLNEED)


def read_only_what_is_asked(address: int, n_bytes: int) -> None:
    """Have the system read no page around one that is touched: what is needed is asked for."""
    advise = _madvise()
    if advise is None or n_bytes == 0:
        return
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, address + n_bytes - start, mmap.MADV_RANDOM)


def page_in_memory(address: int) -> bool | None:
    """Whether the page of that byte is in RAM; None when the system does not say.

    Of a file that is not ours to write the system says that everything is there.
    """
    function = _c_function("mincore", ctypes.c_void_p)
    if function is None:
        return None
    page = ctypes.c_ubyte()
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return None if function(start, 1, ctypes.addressof(page)) else bool(page.value & 1)


def pages_in_memory(view: NDArray[np.uint8]) -> tuple[int, int] | None:
    """(pages in RAM, pages) under a view; None when the system does not say."""
    function = _c_function("mincore", ctypes.c_void_p)
    if function is None:
        return None
    start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    n_bytes = view.ctypes.data + view.nbytes - start if view.nbytes else 0
    pages = np.empty(-(-n_bytes // mmap.PAGESIZE), np.uint8)
    if n_bytes and function(start, n_bytes, pages.ctypes.data):
        return None
    return int(np.count_nonzero(pages & 1)), len(pages)


def _madvise() -> Any:
    """The C library's madvise, or None where there is none."""
    return _c_function("madvise", ctypes.c_int)


@cache
def _c_function(name: str, last_argument: Any) -> Any:
    """name(address, bytes, last argument) -> int of the C library; None where there is none."""
    if not sys.platform.startswith(("linux", "darwin")):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, last_argument]
    function.restype = ctypes.c_int
    return function
