# mypy: allow-untyped-defs, allow-untyped-decorators
"""Float matrices inside Triton programs that do more than one product: eight columns a lane.

Knows no grids and no outputs. A lane takes runs of 8 neighbouring columns and adds them in
ascending order, whatever the number of tokens. Loads are 16 bytes wide, take the layout of their
users (nothing goes through shared memory), and all of a row are in flight at once.
kernels/float_product is the plain product of whole matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata.kernels.triton_common import load_words4, load_words4_now

RUN = tl.constexpr(8)
"""Neighbouring columns of one lane."""


@triton.jit
def load_runs(p, rows, N: tl.constexpr, RUNS: tl.constexpr):
    """Matrix rows in steps of RUNS runs, unconverted: one tuple of words a step.

    p: pointer to f32, f16 or bf16 on a multiple of 16 bytes, not written by this kernel. rows:
    row numbers [rows, 1]. N: columns, a multiple of 8. Runs beyond N repeat the last one.
    """
    return _all_at_once(_steps(p, rows, N, RUNS, False))


@triton.jit
def load_runs_now(p, rows, N: tl.constexpr, RUNS: tl.constexpr):
    """``load_runs`` whose loads stand where they are called, before any barrier."""
    return _steps(p, rows, N, RUNS, True)


@triton.jit
def _steps(p, rows, N: tl.constexpr, RUNS: tl.constexpr, NOW: tl.constexpr):
    STEPS: tl.constexpr = (N // RUN + RUNS - 1) // RUNS
    load: tl.constexpr = load_words4_now if NOW else load_words4
    steps = ()
    for i in tl.static_range(STEPS):
        address = _run_address(p, rows, i, N, RUNS)
        words = load(address)
        if p.dtype.element_ty == tl.float32:
            words = words + load(address + 16)
        steps = steps + (words,)
    return steps


@triton.jit
def _run_address(p, rows, i, N: tl.constexpr, RUNS: tl.constexpr):
    run = tl.minimum(i * RUNS + tl.arange(0, RUNS)[None, :], N // RUN - 1)
    return (p + rows.to(tl.int64) * N + run * RUN).to(tl.int64)


@triton.jit
def _all_at_once(steps):
    """The same words, of which none can be used before all are loaded.

    The assembler would move loads down to their uses to save registers, which leaves too few bytes
    in flight. Every sum begins with step 0, so a zero made of all the others is put into step 0.
    """
    if len(steps) == 1:
        return steps
    else:
        seen = steps[1][0]
        for i in tl.static_range(2, len(steps)):
            seen = seen | steps[i][0]
        zero = seen & tl.program_id(2)  # grids have two axes: 0, which the assembler cannot know
        first = ()
        for i in tl.static_range(len(steps[0])):
            first = first + (steps[0][i] | zero,)
        return (first,) + steps[1:]


@triton.jit
def _floats(words, dtype: tl.constexpr):
    """The eight numbers of a run as f32."""
    y = ()
    for i in tl.static_range(len(words)):
        if dtype == tl.float32:
            y = y + (words[i].to(tl.float32, bitcast=True),)
        elif dtype == tl.bfloat16:
            y = y + ((words[i] << 16).to(tl.float32, bitcast=True),)
            y = y + ((words[i] & -65536).to(tl.float32, bitcast=True),)
        else:
            tl.static_assert(dtype == tl.float16)
            y = y + (words[i].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
            y = y + ((words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
    return y


@triton.jit
def token_runs(x, N: tl.constexpr, RUNS: tl.constexpr):
    """One token in steps of RUNS runs; the loads stand where they are called, before any barrier.

    x: f32 pointer, a multiple of 16 bytes, not written by this kernel.
    """
    STEPS: tl.constexpr = (N // RUN + RUNS - 1) // RUNS
    steps = ()
    for i in tl.static_range(STEPS):
        run = tl.minimum(i * RUNS + tl.arange(0, RUNS)[None, :], N // RUN - 1)
        address = (x + run * RUN).to(tl.int64)
        steps = steps + (load_words4_now(address) + load_words4_now(address + 16),)
    return steps


@triton.jit
def runs_times(steps, x_steps, N: tl.constexpr, RUNS: tl.constexpr, dtype: tl.constexpr, acc):
    """acc [rows, RUNS] + the loaded rows times one token; a row's product is its sum over axis 1.

    x_steps: of ``token_runs``. dtype: of the rows.
    """
    for i in tl.static_range(len(steps)):
        w = _floats(steps[i], dtype)
        x_run = _floats(x_steps[i], tl.float32)
        y = acc
        for e in tl.static_range(RUN):
            y = tl.fma(w[e], tl.broadcast_to(x_run[e], acc.shape), y)
        if (i + 1) * RUNS * RUN > N:
            run = i * RUNS + tl.arange(0, RUNS)[None, :]
            y = tl.where(run < N // RUN, y, acc)
        acc = y
    return acc
