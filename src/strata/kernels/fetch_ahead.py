# mypy: allow-untyped-defs, allow-untyped-decorators
"""A program asks for the weights it is going to read before it waits for its turn.

Weights never change, so they may be on their way from memory to L2 while the kernel before still
runs. Knows no products. From compute capability 9.0 on; elsewhere, and in Triton's interpreter,
nothing happens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from strata.kernels.triton_common import INTERPRET


@triton.jit
def fetch(address, n_bytes, MOST: tl.constexpr, LANES: tl.constexpr):
    """Have bytes [address, address + n_bytes) brought into L2; both are multiples of 16.

    MOST: at least n_bytes. LANES: threads that share the asking.
    """
    if not INTERPRET and cuda_capability_geq(9):
        SHARE: tl.constexpr = (MOST + LANES * 16 - 1) // (LANES * 16) * 16
        first = tl.arange(0, LANES) * SHARE
        size = tl.minimum(n_bytes - first, SHARE)
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.gt.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [address + first, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fetch_rows(
    M: tl.constexpr,
    IS_TILES: tl.constexpr,
    base,
    first_row,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rows first_row .. of a matrix at address base, of tiles their codes, as far as they exist."""
    if IS_TILES:
        TILE: tl.constexpr = M.n_cols // 32 * M.bits * 64
        if ROWS < 16:
            # the programs of a tile row share it
            MOST: tl.constexpr = TILE * ROWS // 16
            start = first_row // 16 * TILE + first_row % 16 // ROWS * MOST
            fetch(base + start, MOST, MOST, LANES)
        else:
            MOST_TILES: tl.constexpr = ROWS // 16 * TILE
            start = first_row // 16 * TILE
            fetch(
                base + start, tl.minimum(M.tile_rows * TILE - start, MOST_TILES), MOST_TILES, LANES
            )
    else:
        ROW: tl.constexpr = M.n_cols * (4 if M.dtype == "F32" else 2)
        start = first_row * ROW
        n_bytes = tl.minimum(M.n_rows * ROW - start, ROWS * ROW)
        # whole pieces of 16 bytes inside the rows
        skip = (16 - (base + start) % 16) % 16
        fetch(base + start + skip, (n_bytes - skip.to(tl.int32)) // 16 * 16, ROWS * ROW, LANES)
