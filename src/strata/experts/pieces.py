"""Work on experts cut into pieces and spread over threads; the calling thread reports progress.

Knows no formats. What a piece does should spend its time without the interpreter lock: copies,
NumPy loops, native code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from strata.experts.store import Progress, stride_of
from strata.kernels.expert_rows import ExpertShape

PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Piece:
    """Experts first .. stop - 1 of a layer, n_bytes as they lie in RAM."""

    layer: int
    first: int
    stop: int
    n_bytes: int


def cut(shapes: Sequence[tuple[ExpertShape, int] | None]) -> list[Piece]:
    """All experts in pieces of about 8 MiB, at least one expert each, in order."""
    pieces = []
    for layer, entry in enumerate(shapes):
        if entry is None:
            continue
        stride, n_experts = stride_of(entry[0]), entry[1]
        step = max(1, PIECE_BYTES // max(stride, 1))
        for first in range(0, n_experts, step):
            stop = min(first + step, n_experts)
            pieces.append(Piece(layer, first, stop, (stop - first) * stride))
    return pieces


def run_pieces(
    pieces: Sequence[Piece],
    work: Callable[[Piece], None],
    workers: int,
    phase: str,
    progress: Progress | None,
) -> None:
    """Do ``work`` on every piece with that many threads.

    progress sees (phase, bytes done, bytes in all), ascending, from this thread, 0 first. The first
    error ends the work: pieces not begun are dropped, and it is raised once the others have ended.
    """
    total, done = sum(piece.n_bytes for piece in pieces), 0
    if progress is not None:
        progress(phase, 0, total)
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="strata-load") as pool:
        waiting = {pool.submit(work, piece): piece for piece in pieces}
        try:
            for future in as_completed(waiting):
                future.result()
                done += waiting[future].n_bytes
                if progress is not None:
                    progress(phase, done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
