"""How a set of products with one input is laid over GPU programs: fixed rules, no measuring.

Knows no kernels and no tensors' contents. A *part* is a run of matrices of one shape and type; its
programs own consecutive rows. The result of a row depends on nothing that is chosen here but the
lanes of float rows, which are a function of the width alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.kernels.gpu_matrix import FloatMatrix, Matrix, TileMatrix, matrix_of
from strata.kernels.gpu_weight import GpuWeight

MOST_TOKENS = 8
_PROGRAMS_WANTED = 264
"""Two for each multiprocessor of an H200."""
_MANY_ROWS = 8192


@dataclass(frozen=True)
class Tuning:
    """Programs of a launch: warps of each; matrix rows of a program with tiles, and with floats;
    blocks of a segment in flight (tiles)."""

    warps: int
    tile_rows: int
    float_rows: int
    stages: int


@dataclass(frozen=True)
class Part:
    """``count`` matrices from number ``first`` on, each with ``programs`` programs of ``rows``.

    The first program of the part is ``start``. Kernels take it as a compile-time value.
    """

    matrix: Matrix
    is_tiles: bool
    first: int
    count: int
    start: int
    programs: int
    rows: int
    stages: int
    narrow: bool
    scaled: bool

    @property
    def end(self) -> int:
        """The program after the part's last."""
        return self.start + self.count * self.programs


def is_narrow(rows: int, warps: int) -> bool:
    """Whether a thread has fewer than four rows of its segment."""
    return rows * 8 < 4 * 32 * warps


def tune(matrices: Sequence[Matrix], n_tokens: int) -> Tuning:
    """The rule. Tiles: one warp with four rows a thread, fewer rows when that leaves a large GPU
    half empty. Floats alone: a thread for each 16 bytes of a row's step."""
    floats = [m for m in matrices if isinstance(m, FloatMatrix)]
    n_tile_rows = sum(m.n_rows for m in matrices if isinstance(m, TileMatrix))
    warps = 1
    if not n_tile_rows:
        warps = min(max(*(m.lanes // m.vector // 32 for m in floats), 1), 8)
    tile_rows = 16
    while tile_rows > 4 and n_tile_rows // tile_rows < _PROGRAMS_WANTED // 2:
        tile_rows //= 2
    # where programs are plenty they hide each other's loads (H200, 16384 x 2560, 1 token: 14.9 us
    # against 16.2 with 5 and 21.2 with 8 blocks in flight)
    stages = 3 if n_tokens == 1 and n_tile_rows >= _MANY_ROWS else 5
    return Tuning(warps, tile_rows, _float_rows(floats, warps, n_tokens), stages)


def _float_rows(floats: Sequence[FloatMatrix], warps: int, n_tokens: int) -> int:
    """Float rows a program: those that stand side by side, a few times more while programs are
    plenty (every program rereads the inputs) and registers last."""
    if not floats:
        return 1
    side_by_side = min(max(32 * warps * m.vector // m.lanes, 1) for m in floats)
    n_rows = sum(m.n_rows for m in floats)
    rows, most = side_by_side, side_by_side * (4 if n_tokens <= 4 else 2)
    while rows < most and n_rows // (2 * rows) >= _PROGRAMS_WANTED // (2 if n_tokens > 2 else 1):
        rows *= 2
    return rows


def make_parts(weights: Sequence[GpuWeight], tuning: Tuning) -> tuple[Part, ...]:
    """Parts of a launch over the weights in their order."""
    parts: list[Part] = []
    for i, weight in enumerate(weights):
        matrix, scaled = matrix_of(weight), weight.scale != 1.0
        last = parts[-1] if parts else None
        if last is not None and last.matrix == matrix and last.scaled == scaled:
            parts[-1] = Part(**{**vars(last), "count": last.count + 1})
            continue
        rows = tuning.tile_rows if weight.is_tiles else tuning.float_rows
        start = 0 if last is None else last.end
        programs = -(-weight.n_rows // rows)
        parts.append(
            Part(
                matrix,
                weight.is_tiles,
                i,
                1,
                start,
                programs,
                rows,
                tuning.stages,
                is_narrow(rows, tuning.warps),
                scaled,
            )
        )
    return tuple(parts)
