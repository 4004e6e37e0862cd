# mypy: allow-untyped-defs, allow-untyped-decorators
"""Numbers handed from thread to thread of a program through memory that the kernel itself owns.

Triton moves values between threads only as whole tensors, and where each value then lies is the
compiler's choice. Where an order of additions must be kept, a kernel says itself who reads what:
a *room* of shared memory, numbers stored at addresses in it, ``tl.debug_barrier``, numbers loaded.
For compiled kernels only; the interpreter has no shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _room_text(n_bytes):
    return "{ .shared .align 16 .b8 room[" + str(n_bytes) + "]; mov.u32 $0, room; }"


@triton.jit
def shared_room(N_BYTES: tl.constexpr):
    """Address of shared memory, a multiple of 16; N_BYTES: with the compiler's own at most 48 KiB
    in a kernel."""
    return tl.inline_asm_elementwise(
        _room_text(N_BYTES), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put2(address, a, b):
    """Store two f32 at each int32 address, a multiple of 8."""
    tl.inline_asm_elementwise(
        "st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, 0;",
        "=r,r,r,r",
        [address, a, b],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def put4(address, a, b, c, d):
    """Store four f32 at each int32 address, a multiple of 16."""
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,r,r,r,r,r",
        [address, a, b, c, d],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def get2(address):
    """Two f32 from each int32 address, a multiple of 8."""
    return tl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];",
        "=r,=r,r",
        [address],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def get4(address):
    """Four f32 from each int32 address, a multiple of 16."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        [address],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
