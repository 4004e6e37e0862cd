# mypy: allow-untyped-defs, allow-untyped-decorators
"""Programs of one launch that wait for others of the same launch, by counters in device memory.

Only for programs with *lower* numbers: those are given to multiprocessors first, so they end even
where the rest of the grid does not fit beside them. Triton's interpreter runs programs one after
the other by number; there nobody has to wait.

Counters are 0 before and after every launch: each of the programs that wait last counts itself as
it goes on, and the one that finds all others counted sets them back. A wait of 2^22 polls (seconds)
can only be a defect; the program traps then, which the host sees as an error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.triton_common import INTERPRET


@triton.jit
def arrive(counter):
    """Count this program. What all its threads wrote before is visible to who sees the count."""
    if not INTERPRET:
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_for(counter, count: tl.constexpr):
    """Hold this program until ``count`` programs have arrived."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .u32 v; .reg .u32 polls;
            mov.u32 polls, 0;
            mov.u32 v, %tid.x;
            setp.ne.u32 p, v, 0;
            @p bra done;
            poll:
            add.u32 polls, polls, 1;
            setp.gt.u32 p, polls, 4194304;
            @p trap;
            ld.acquire.gpu.global.u32 v, [$1];
            setp.ne.u32 p, v, $2;
            @p bra poll;
            done:
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [counter.to(tl.int64), tl.full((), count, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def wait_last(counter, count: tl.constexpr, gone):
    """``wait_for``, and count this program in ``gone``: how many were there before, for
    ``set_back``. Asked for here, as the answer takes as long as a load from far away."""
    before = 0
    if not INTERPRET:
        before = tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .u32 v; .reg .u32 n; .reg .u32 polls;
            mov.u32 n, -1;
            mov.u32 polls, 0;
            mov.u32 v, %tid.x;
            setp.ne.u32 p, v, 0;
            @p bra done;
            poll:
            add.u32 polls, polls, 1;
            setp.gt.u32 p, polls, 4194304;
            @p trap;
            ld.acquire.gpu.global.u32 v, [$1];
            setp.ne.u32 p, v, $2;
            @p bra poll;
            atom.relaxed.gpu.global.add.u32 n, [$3], 1;
            done:
            mov.u32 $0, n;
            }""",
            "=r,l,r,l",
            [counter.to(tl.int64), tl.full((), count, tl.int32), gone.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    return before


@triton.jit
def set_back(before, count: tl.constexpr, first, second, gone):
    """The last of ``count`` programs makes all three counters 0. before: of ``wait_last``."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .u32 z;
            mov.u32 z, 0;
            setp.eq.u32 p, $1, $2;
            @p st.relaxed.gpu.global.u32 [$3], z;
            @p st.relaxed.gpu.global.u32 [$4], z;
            @p st.relaxed.gpu.global.u32 [$5], z;
            mov.u32 $0, 0;
            }""",
            "=r,r,r,l,l,l",
            [
                before,
                tl.full((), count - 1, tl.int32),
                first.to(tl.int64),
                second.to(tl.int64),
                gone.to(tl.int64),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
