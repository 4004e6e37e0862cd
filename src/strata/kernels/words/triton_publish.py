# mypy: allow-untyped-defs, allow-untyped-decorators
"""The payload of a ring, written by the GPU into memory that the host reads: one launch.

Activations, and which rows the CPU has to compute: int32 [counts 4 | expert R | start R + 1 | row R
| token R], with R rows of this window. Nothing is written when the layer has nothing for the host.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from strata.kernels.triton_common import EXACT

_BLOCK = 1024


class CpuRows(Protocol):
    """What the plan left for the CPU (kernels/plan)."""

    @property
    def expert(self) -> torch.Tensor: ...
    @property
    def start(self) -> torch.Tensor: ...
    @property
    def row(self) -> torch.Tensor: ...
    @property
    def token(self) -> torch.Tensor: ...
    @property
    def counts(self) -> torch.Tensor: ...


@triton.jit
def publish_kernel(
    x, expert, start, row, token, counts, any_out, x_out, ints_out,
    N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program p copies BLOCK numbers of x; the first one also the groups."""
    p = tl.program_id(0)
    groups = tl.load(counts) + tl.load(counts + 2)
    if p == 0:
        tl.store(any_out, groups)
    if groups > 0:
        i = p * BLOCK + tl.arange(0, BLOCK)
        to = tl.multiple_of(x_out.to(tl.pointer_type(tl.float32)), 16)
        tl.store(to + i, tl.load(x + i, mask=i < N, other=0.0), mask=i < N)
        if p == 0:
            ints = tl.multiple_of(ints_out.to(tl.pointer_type(tl.int32)), 16)
            r = tl.arange(0, BLOCK_R)
            ok = r < R
            tl.store(ints + r, tl.load(counts + r, mask=r < 4, other=0), mask=r < 4)
            tl.store(ints + 4 + r, tl.load(expert + r, mask=ok, other=0), mask=ok)
            begin = tl.load(start + r, mask=r < R + 1, other=0)
            tl.store(ints + 4 + R + r, begin, mask=r < R + 1)
            tl.store(ints + 5 + 2 * R + r, tl.load(row + r, mask=ok, other=0), mask=ok)
            tl.store(ints + 5 + 3 * R + r, tl.load(token + r, mask=ok, other=0), mask=ok)


def publish(
    x_TD: torch.Tensor,
    cpu: CpuRows,
    n_rows: int,
    any_out: torch.Tensor,
    x_out: int,
    ints_out: int,
) -> None:
    """One launch. x f32 [T, D], contiguous. any_out: int32 [1] on the device, the number of groups
    for the host. x_out, ints_out: device addresses, multiples of 16."""
    assert x_TD.is_contiguous() and x_TD.dtype == torch.float32, "x is f32 and contiguous"
    n = x_TD.numel()
    publish_kernel[(triton.cdiv(n, _BLOCK),)](
        x_TD, cpu.expert, cpu.start, cpu.row, cpu.token, cpu.counts, any_out, x_out,
        ints_out, N=n, R=n_rows, BLOCK=_BLOCK,
        BLOCK_R=max(4, triton.next_power_of_2(n_rows + 1)), num_warps=4, **EXACT,
    )  # fmt: skip
