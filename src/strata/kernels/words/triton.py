"""Ring and wait on an NVIDIA GPU: one small program each, as nodes of the window's graph.

The ring fences system-wide before its release store, so that the payload, written by earlier
kernels, is visible to the
host first. The wait polls with acquire loads and gives up after a limit of its own, for a host that
died; rows are
read by the *next* node. Both return at once when the layer has nothing for the host (count 0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.triton_common import EXACT


@triton.jit
def announce(word, value):
    """Everything that the program has written, and earlier kernels, is visible to the host; then
    the word is ``value``.

    One thread stores: once the host has seen the value it may set the word back, and a second
    store would undo that. In a program of several warps a barrier stands before.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        fence.acq_rel.sys;
        @first st.release.sys.global.u32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [word, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _ring(word: tl.int64, value: tl.int32, count_ptr) -> None:
    count = tl.load(count_ptr)
    if count > 0:
        announce(word, value)


@triton.jit
def _wait(word: tl.int64, value: tl.int32, limit_ns: tl.int64, error: tl.int64, count_ptr) -> None:
    count = tl.load(count_ptr)
    if count > 0:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .pred q; .reg .u32 v; .reg .u64 t0; .reg .u64 t1;
            mov.u64 t0, %globaltimer;
            poll:
            ld.acquire.sys.global.u32 v, [$1];
            setp.ge.u32 p, v, $2;
            @p bra done;
            mov.u64 t1, %globaltimer;
            sub.u64 t1, t1, t0;
            setp.gt.u64 q, t1, $3;
            @!q bra poll;
            st.release.sys.global.u32 [$4], $2;
            done:
            mov.u32 $0, 0;
            }""",
            "=r,l,r,l,l",
            [word, value, limit_ns, error],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def ring(word: int, value: int, count: torch.Tensor) -> None:
    """Device address of the word; count int32 [1] on the device: 0 rings nothing."""
    _ring[(1,)](word, value, count, num_warps=1, **EXACT)


def wait(word: int, value: int, limit_ns: int, error: int, count: torch.Tensor) -> None:
    """Hold the stream until the word is at least ``value``; after limit_ns the error word becomes
    ``value``."""
    _wait[(1,)](word, value, limit_ns, error, count, num_warps=1, **EXACT)
