"""How fast files are read from where they lie, past the system's page cache.

Reads pieces at random places with several requests under way, as read-ahead of experts does. Knows
no tensors.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 1 << 20
REQUESTS = 8
"""Under way at once."""


@dataclass(frozen=True)
class Span:
    """Bytes [offset, offset + n_bytes) of a file."""

    path: Path
    offset: int
    n_bytes: int


def disk_speed(
    spans: Sequence[Span], seconds: float = 0.5, clock: Callable[[], float] = time.perf_counter
) -> float | str:
    """Bytes a second of direct reads inside the spans, for about that long; or why not, in words.

    Direct reads neither use nor change the page cache.
    """
    if not hasattr(os, "O_DIRECT"):
        return "this system has no direct reads"
    large = [span for span in spans if span.n_bytes >= 2 * PIECE_BYTES]
    if not large:
        return "no matrix is large enough"
    files: dict[Path, int] = {}
    try:
        for span in large:
            if span.path not in files:
                files[span.path] = os.open(span.path, os.O_RDONLY | os.O_DIRECT)
        return _read(large, files, seconds, clock)
    except OSError as error:
        return f"direct reads are refused here ({error.strerror or error})"
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _read(
    spans: Sequence[Span], files: dict[Path, int], seconds: float, clock: Callable[[], float]
) -> float:
    start = clock()

    def work(_: int) -> int:
        # places differ from run to run: those of the last run may lie in some other cache
        draw, n_bytes = random.Random(), 0
        with mmap.mmap(-1, PIECE_BYTES) as memory:
            while not n_bytes or clock() - start < seconds:
                span = draw.choices(spans, weights)[0]
                first = -(-span.offset // mmap.PAGESIZE)
                last = (span.offset + span.n_bytes - PIECE_BYTES) // mmap.PAGESIZE
                at = draw.randint(first, last) * mmap.PAGESIZE
                n_bytes += os.preadv(files[span.path], [memory], at)
        return n_bytes

    weights = [span.n_bytes for span in spans]
    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="strata-disk") as pool:
        total = sum(pool.map(work, range(REQUESTS)))
    return total / (clock() - start)
