# mypy: allow-untyped-defs, allow-untyped-decorators
"""What the host made of a layer's experts, from host memory that the device reads: rows into their
places among the device's rows (bits are copied), and the addresses of experts that are its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["first"])
def take_rows_kernel(source, row, rows, first, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: number first + i of the source."""
    i = first + tl.program_id(0).to(tl.int64)
    to = rows + tl.load(row + i).to(tl.int64) * D
    for d0 in tl.static_range(0, D, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        tl.store(to + d, tl.load(source + i * D + d, mask=d < D), mask=d < D)


def take_rows(
    source_ND: torch.Tensor, row_N: torch.Tensor, first: int, end: int, rows_RD: torch.Tensor
) -> None:
    """rows[row[i]] = source[i] for first <= i < end; other rows stay. One launch, or none.

    source f32 [N, D] and row int32 [N] may lie in page-locked host memory.
    """
    width = rows_RD.shape[1]
    assert source_ND.shape[1] == width and 0 <= first <= end <= len(row_N), (first, end)
    assert rows_RD.is_contiguous() and source_ND.is_contiguous() and row_N.is_contiguous()
    if first < end:
        take_rows_kernel[(end - first,)](
            source_ND, row_N, rows_RD, first, D=width, BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def leave_out_kernel(taken, addr, E: tl.constexpr, BLOCK: tl.constexpr):
    """Program p: BLOCK experts."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gone = tl.load(taken + e, mask=e < E, other=0) != 0
    tl.store(addr + e, tl.zeros((BLOCK,), tl.int64), mask=gone)


def leave_out(taken_E: torch.Tensor, addr_E: torch.Tensor) -> None:
    """addr[e] = 0 wherever taken[e] is not 0. One launch.

    taken int32 [E] may lie in page-locked host memory; addr int64 [E].
    """
    n_experts = len(addr_E)
    assert len(taken_E) == n_experts and addr_E.is_contiguous(), (taken_E.shape, addr_E.shape)
    leave_out_kernel[(triton.cdiv(n_experts, 128),)](
        taken_E, addr_E, E=n_experts, BLOCK=128, num_warps=4
    )
