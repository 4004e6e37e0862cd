"""How a set of products with one input is laid over GPU programs: fixed rules, no measuring.

Knows no kernels and no tensors' contents. A *part* is a run of matrices of one shape and type; its
programs own consecutive rows. The result of a row depends on nothing that is chosen here but the
lanes of float rows, which are a function of the width alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata.kernels.gpu_matrix import FloatMatrix, Matrix, TileMatrix, factors, matrix_of
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.quantize.ref import N_SEGMENTS, segment_blocks

MOST_TOKENS = 8
_PROGRAMS_WANTED = 264
"""Two for each multiprocessor of an H200."""
_MANY_ROWS = 8192
_SPREAD_ROWS, _SPREAD_COLS, _SPREAD_TOKENS = 4096, (4096, 6144), 4
"""Matrices of 8-bit tiles whose blocks are spread over threads. H200, Q6_K 6144 -> 2560: 8.2 us
against 12.7 for 1 token, 11.0 against 19.9 for 4; a program that only reads the bytes takes 6.0.
16384 rows of 2560 columns are no faster so; tiles of fewer bits were not measured."""
_MOST_ROOM = 47 << 10
"""Bytes of shared memory for factors: 48 KiB less what the compiler wants."""


@dataclass(frozen=True)
class Tuning:
    """Programs of a launch: warps of each; matrix rows of a program with tiles, and with floats;
    blocks of a segment in flight (tiles); blocks of a segment that threads share (``tile_spread``;
    all are in flight), 1: a lane has them all."""

    warps: int
    tile_rows: int
    float_rows: int
    stages: int
    blocks: int = 1


@dataclass(frozen=True)
class Spread:
    """How the factors of spread blocks lie in shared memory, a copy for each token.

    rows of a program; blocks of a segment in a step; numbers of a block and row. Bytes: from row to
    row, slot to slot (a gap lets threads meet other banks), from the first four numbers to the
    others, and of the whole. at_end: it holds a row's every slot, and sums are made at the end;
    else it holds two steps.
    """

    rows: int
    blocks: int
    numbers: int
    row_bytes: int
    slot_bytes: int
    plane_bytes: int
    n_bytes: int
    at_end: bool


def spread_of(matrix: TileMatrix, n_tokens: int, tuning: Tuning) -> Spread | None:
    """None: the factors of n_tokens do not fit."""
    numbers, rows = factors(matrix), tuning.tile_rows
    row_bytes = 4 * min(numbers, 4)
    slot_bytes = row_bytes * (rows + rows // 4)
    planes, step = max(numbers // 4, 1), N_SEGMENTS * tuning.blocks
    every = -(-segment_blocks(matrix.n_cols) // tuning.blocks) * step
    for slots in (every, 2 * step):
        n_bytes = slots * slot_bytes * planes
        if n_bytes * n_tokens <= _MOST_ROOM:
            plane, at_end = slots * slot_bytes, slots == every
            return Spread(
                rows, tuning.blocks, numbers, row_bytes, slot_bytes, plane, n_bytes, at_end
            )
    return None


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
    spread: Spread | None = None

    @property
    def end(self) -> int:
        """The program after the part's last."""
        return self.start + self.count * self.programs


def is_narrow(rows: int, warps: int, blocks: int = 1) -> bool:
    """Whether a thread has fewer than four rows of its segment."""
    return rows * 8 * blocks < 4 * 32 * warps


def tune(matrices: Sequence[Matrix], n_tokens: int) -> Tuning:
    """The rule. Tiles: one warp with four rows a thread, fewer rows when that leaves a large GPU
    half empty. Floats alone: a thread for each 16 bytes of a row's step."""
    floats = [m for m in matrices if isinstance(m, FloatMatrix)]
    n_tile_rows = sum(m.n_rows for m in matrices if isinstance(m, TileMatrix))
    warps = 1
    if not n_tile_rows:
        warps = min(max(*(m.lanes // m.vector // 32 for m in floats), 1), 8)
    spread = Tuning(2, 8, 1, 0, 4)
    if _is_spread(matrices, n_tokens, n_tile_rows, spread):
        return spread
    tile_rows = 16
    while tile_rows > 4 and n_tile_rows // tile_rows < _PROGRAMS_WANTED // 2:
        tile_rows //= 2
    # where programs are plenty they hide each other's loads (H200, 16384 x 2560, 1 token: 14.9 us
    # against 16.2 with 5 and 21.2 with 8 blocks in flight)
    stages = 3 if n_tokens == 1 and n_tile_rows >= _MANY_ROWS else 5
    return Tuning(warps, tile_rows, _float_rows(floats, warps, n_tokens), stages)


def _is_spread(matrices: Sequence[Matrix], n_tokens: int, n_tile_rows: int, tuning: Tuning) -> bool:
    """Whether the launch is of few long rows in 8-bit tiles alone."""
    low, high = _SPREAD_COLS
    return n_tokens <= _SPREAD_TOKENS and n_tile_rows <= _SPREAD_ROWS and all(
        isinstance(m, TileMatrix)
        and m.bits == 8
        and low <= m.n_cols <= high
        and spread_of(m, n_tokens, tuning) is not None
        for m in matrices
    )  # fmt: skip


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


def make_parts(weights: Sequence[GpuWeight], tuning: Tuning, n_tokens: int) -> tuple[Part, ...]:
    """Parts of a launch over the weights in their order."""
    parts: list[Part] = []
    for i, weight in enumerate(weights):
        matrix, scaled = matrix_of(weight), weight.scale != 1.0
        last = parts[-1] if parts else None
        if last is not None and last.matrix == matrix and last.scaled == scaled:
            parts[-1] = replace(last, count=last.count + 1)
            continue
        rows = tuning.tile_rows if weight.is_tiles else tuning.float_rows
        spread = None
        if isinstance(matrix, TileMatrix) and tuning.blocks > 1:
            spread = spread_of(matrix, n_tokens, tuning)
            assert spread is not None, f"no room for {n_tokens} tokens of {tuning}"
        parts.append(
            Part(
                matrix,
                weight.is_tiles,
                i,
                1,
                0 if last is None else last.end,
                -(-weight.n_rows // rows),
                rows,
                tuning.stages,
                is_narrow(rows, tuning.warps, tuning.blocks),
                scaled,
                spread,
            )
        )
    return tuple(parts)


def room_bytes(parts: Sequence[Part], n_tokens: int) -> int:
    """Shared memory that the factors of a program need, 0 without spread blocks."""
    return max((p.spread.n_bytes * n_tokens for p in parts if p.spread), default=0)
