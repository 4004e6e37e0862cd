# mypy: allow-untyped-defs, allow-untyped-decorators
"""What the host made of a layer's experts, from host memory that the device reads: rows into their
places among the device's rows (bits are copied), and the addresses of experts that are its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def take_rows_kernel(source, at, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program (r, p): columns p * BLOCK and up of row r, if the host has it."""
    r = tl.program_id(0).to(tl.int64)
    from_row = tl.load(at + r).to(tl.int64)
    if from_row >= 0:
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = d < D
        tl.store(rows + r * D + d, tl.load(source + from_row * D + d, mask=ok), mask=ok)


def take_rows(source_ND: torch.Tensor, at_R: torch.Tensor, rows_RD: torch.Tensor) -> None:
    """rows[r] = source[at[r]] wherever at[r] is not negative; other rows stay. One launch.

    source f32 [N, D] and at int32 [R] may lie in page-locked host memory.
    """
    n_rows, width = rows_RD.shape
    assert len(at_R) == n_rows and source_ND.shape[1] == width, (at_R.shape, source_ND.shape)
    assert rows_RD.is_contiguous() and source_ND.is_contiguous() and at_R.is_contiguous()
    take_rows_kernel[(n_rows, triton.cdiv(width, _BLOCK))](
        source_ND, at_R, rows_RD, D=width, BLOCK=_BLOCK, num_warps=4
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
