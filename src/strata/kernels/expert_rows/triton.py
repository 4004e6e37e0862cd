# mypy: allow-untyped-defs, allow-untyped-decorators
"""Expert feed-forwards on the GPU, grouped by expert: two launches for all experts of a layer.

``gate_up`` makes h = activation(gate x, up x) of every row and quantizes it; ``down`` makes the
unweighted rows. Experts are bit-equal to ``ref.expert_rows_contract``; float rows of a dense
feed-forward use the order of ``float_product``. An expert's weights are read once for up to
RowTuning.batch rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.contract_rows import contract_products
from strata.kernels.expert_rows.launch import (
    GpuExpert,
    GpuGroups,
    Hidden,
    RowTuning,
    batch_of,
    dense_expert,
    first_half,
    tune_down,
    tune_gate_up,
)
from strata.kernels.float_product import float_product, load_rows
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.quantize.ref import Quantized
from strata.kernels.quantize.triton import quantize, store_blocks
from strata.kernels.tile_ahead import tile_products_ahead, twin_products_ahead
from strata.kernels.tile_product import tile_products, twin_products
from strata.kernels.triton_common import EXACT, activate, tuple_of


@triton.jit
def _products(
    M: tl.constexpr, IS_TILES: tl.constexpr, N: tl.constexpr, base, first_row, x, q, meta
):
    """N.rows rows of one matrix times every token: a tuple of f32 [N.rows]."""
    ROWS: tl.constexpr = N.rows
    if IS_TILES and N.ahead:
        y = tile_products_ahead(M, base, first_row, q, meta, ROWS, N.ahead, N.narrow)
    elif IS_TILES:
        y = tile_products(tuple_of(M), (base,), first_row, q, meta, ROWS, N.stages, N.narrow)
    elif M.contract:
        y = contract_products(M, base, first_row, x, ROWS)
    else:
        steps = load_rows(M, base, first_row, ROWS)
        y = ()
        for t in tl.static_range(len(x)):
            y = y + (float_product(M, steps, x[t], ROWS),)
    return y


@triton.jit
def _gate_and_up(E: tl.constexpr, N: tl.constexpr, gate, up, lift, first_row, x, q, meta):
    """N.rows rows of gate, then of up, times every token: 2 T of f32 [N.rows].

    lift: 32-bit words from gate to up.
    """
    G: tl.constexpr = E.gate
    U: tl.constexpr = E.up
    ROWS: tl.constexpr = N.rows
    if E.twins and N.ahead:
        y = twin_products_ahead(G, gate, lift, first_row, q, meta, ROWS, N.ahead, N.narrow)
    elif E.twins:
        y = twin_products(G, gate, lift, first_row, q, meta, ROWS, N.stages, N.narrow)
    elif E.tiles_in:
        MS: tl.constexpr = tuple_of(G, U)
        y = tile_products(MS, (gate, up), first_row, q, meta, ROWS, N.stages, N.narrow)
    else:
        y = _products(G, E.gate_is_tiles, N, gate, first_row, x, q, meta)
        y = y + _products(U, E.up_is_tiles, N, up, first_row, x, q, meta)
    return y


@triton.jit
def _biased(y, blob, OFFSET: tl.constexpr, row, ok):
    """y plus the bias at that byte of the blob, if there is one."""
    if OFFSET >= 0:
        bias = tl.load((blob + OFFSET).to(tl.pointer_type(tl.float32)) + row, mask=ok, other=0.0)
        y = y + bias
    return y


@triton.jit
def _blob_scale(E: tl.constexpr, blob, N: tl.constexpr):
    """Factor of gate (0), up (1) or down (2)."""
    if E.scale_offset >= 0:
        return tl.load((blob + E.scale_offset).to(tl.pointer_type(tl.float32)) + N)
    else:
        return 1.0


@triton.jit
def _store_hidden(
    E: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, g, u, blob, scales, first_row, h_row,
    valid, h, h_q, h_meta,
):  # fmt: skip
    """Rows first_row .. of h of one routed row, from its gate and up products."""
    ROWS: tl.constexpr = N.rows
    row = first_row + tl.arange(0, ROWS)
    ok = row < E.d_expert
    if E.has_scale:
        g = g * scales[0]
        u = u * scales[1]
    g = _biased(g, blob, E.gate_bias_offset, row, ok)
    u = _biased(u, blob, E.up_bias_offset, row, ok)
    KIND: tl.constexpr = E.activation
    value = activate(g, u, KIND, E.swiglu_limit)
    if E.tiles_in and E.tiles_out:
        BLOCKS: tl.constexpr = ROWS // 32
        NB: tl.constexpr = E.d_expert // 32
        block = first_row // 32 + tl.arange(0, BLOCKS)
        values = tl.reshape(value, (BLOCKS, 32))
        q_row = h_q + h_row * (SLOTS * 32)
        meta_row = h_meta + h_row * (SLOTS * 2)
        store_blocks(values, block, (block < NB) & valid, q_row, meta_row, NB, BLOCKS)
    else:
        tl.store(h + h_row * E.d_expert + row, value, mask=ok & valid)


@triton.jit
def _group(addr, start, n_groups, group, T: tl.constexpr):
    """Number of groups, and blob, first and last entry of this one (if it is one of them)."""
    # volatile: all are on their way before the first is waited for; plain loads sink below the if
    n = tl.load(n_groups, volatile=True)
    blob = tl.load(addr + group, volatile=True)
    first, last = group, group  # of one token every group has one entry
    if T > 1:
        first = tl.load(start + group, volatile=True)
        last = tl.load(start + group + 1, volatile=True) - 1
    return n, blob, first, last


@triton.jit
def _inputs(table, entry, last, B: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, x, q, meta):
    """Pointers to the activations of B entries; entries after the last repeat it.

    table: the row of activations of every entry.
    """
    xs = ()
    qs = ()
    metas = ()
    for b in tl.static_range(B):
        n = tl.load(table + tl.minimum(entry + b, last))
        xs = xs + (x + n * K,)
        qs = qs + (q + n * (SLOTS * 32),)
        metas = metas + (meta + n * (SLOTS * 2),)
    return xs, qs, metas


@triton.jit
def _gate_up_entries(
    E: tl.constexpr, N: tl.constexpr, B: tl.constexpr, SLOTS_X: tl.constexpr,
    SLOTS_H: tl.constexpr, blob, entry, last, entry_row, entry_token, x, q, meta, h, h_q, h_meta,
):  # fmt: skip
    """B entries of one group from ``entry`` on, as far as they exist."""
    first_row = tl.program_id(0) * N.rows
    K: tl.constexpr = E.d_model
    xs, qs, metas = _inputs(entry_token, entry, last, B, K, SLOTS_X, x, q, meta)
    gate = blob + E.gate_offset
    up = blob + E.up_offset
    LIFT: tl.constexpr = (E.up_offset - E.gate_offset) // 4
    y = _gate_and_up(E, N, gate, up, LIFT, first_row, xs, qs, metas)
    scales = (_blob_scale(E, blob, 0), _blob_scale(E, blob, 1))
    for b in tl.static_range(B):
        valid = entry + b <= last
        h_row = tl.load(entry_row + tl.minimum(entry + b, last))
        _store_hidden(
            E, N, SLOTS_H, y[b], y[B + b], blob, scales, first_row, h_row, valid, h, h_q, h_meta
        )  # fmt: skip


@triton.jit
def gate_up_kernel(
    addr, start, entry_row, entry_token, n_groups, x, q, meta, h, h_q, h_meta,
    E: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    SLOTS_X: tl.constexpr, SLOTS_H: tl.constexpr,
):  # fmt: skip
    """Program (p, g): rows p * N.rows .. of gate and up of group g, for all its entries."""
    group = tl.program_id(1)
    n, blob, first, last = _group(addr, start, n_groups, group, T)
    if group < n:
        BATCH: tl.constexpr = N.batch
        CHUNKS: tl.constexpr = (T + BATCH - 1) // BATCH
        if T == 1 or first == last:
            _gate_up_entries(
                E, N, 1, SLOTS_X, SLOTS_H, blob, first, last,
                entry_row, entry_token, x, q, meta, h, h_q, h_meta,
            )  # fmt: skip
        elif BATCH > 1:
            for c in tl.static_range(CHUNKS):
                if first + c * BATCH <= last:
                    _gate_up_entries(
                        E, N, BATCH, SLOTS_X, SLOTS_H, blob, first + c * BATCH, last,
                        entry_row, entry_token, x, q, meta, h, h_q, h_meta,
                    )  # fmt: skip


@triton.jit
def _down_entries(
    E: tl.constexpr, N: tl.constexpr, B: tl.constexpr, SLOTS: tl.constexpr,
    blob, entry, last, entry_row, h, h_q, h_meta, rows,
):  # fmt: skip
    """B entries of one group from ``entry`` on, as far as they exist."""
    ROWS: tl.constexpr = N.rows
    D: tl.constexpr = E.down
    first_row = tl.program_id(0) * ROWS
    K: tl.constexpr = E.d_expert
    xs, qs, metas = _inputs(entry_row, entry, last, B, K, SLOTS, h, h_q, h_meta)
    y = _products(D, E.tiles_out, N, blob + E.down_offset, first_row, xs, qs, metas)
    row = first_row + tl.arange(0, ROWS)
    ok = row < E.d_model
    for b in tl.static_range(B):
        y_b = y[b]
        if E.has_scale:
            y_b = y_b * _blob_scale(E, blob, 2)
        y_b = _biased(y_b, blob, E.down_bias_offset, row, ok)
        n = tl.load(entry_row + tl.minimum(entry + b, last))
        tl.store(rows + n * E.d_model + row, y_b, mask=ok & (entry + b <= last))


@triton.jit
def down_kernel(
    addr, start, entry_row, n_groups, h, h_q, h_meta, rows,
    E: tl.constexpr, N: tl.constexpr, T: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (p, g): rows p * N.rows .. of down of group g, for all its entries."""
    group = tl.program_id(1)
    n, blob, first, last = _group(addr, start, n_groups, group, T)
    if group < n:
        BATCH: tl.constexpr = N.batch
        CHUNKS: tl.constexpr = (T + BATCH - 1) // BATCH
        if T == 1 or first == last:
            _down_entries(E, N, 1, SLOTS, blob, first, last, entry_row, h, h_q, h_meta, rows)
        elif BATCH > 1:
            for c in tl.static_range(CHUNKS):
                if first + c * BATCH <= last:
                    _down_entries(
                        E, N, BATCH, SLOTS, blob, first + c * BATCH, last, entry_row,
                        h, h_q, h_meta, rows,
                    )  # fmt: skip


@triton.jit
def dense_gate_up_kernel(
    gate, up, gate_scale, up_scale, x, q, meta, h, h_q, h_meta,
    E: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    SLOTS_X: tl.constexpr, SLOTS_H: tl.constexpr,
):  # fmt: skip
    """Program p: rows p * N.rows .. of gate and up for all T tokens; row t of h is token t."""
    first_row = tl.program_id(0) * N.rows
    xs = ()
    qs = ()
    metas = ()
    for t in tl.static_range(T):
        xs = xs + (x + t * E.d_model,)
        qs = qs + (q + t * (SLOTS_X * 32),)
        metas = metas + (meta + t * (SLOTS_X * 2),)
    lift = tl.multiple_of((up - gate) // 4, 4)
    y = _gate_and_up(E, N, gate, up, lift, first_row, xs, qs, metas)
    for t in tl.static_range(T):
        _store_hidden(
            E, N, SLOTS_H, y[t], y[T + t], gate, (gate_scale, up_scale), first_row,
            t, True, h, h_q, h_meta,
        )  # fmt: skip


def gate_up(
    expert: GpuExpert,
    groups: GpuGroups,
    x_TD: torch.Tensor,
    x_q: Quantized | None,
    hidden: Hidden,
    tuning: RowTuning | None = None,
) -> None:
    """h of every row of the groups, into row r of ``hidden``. One launch (two when gate or up is
    float and down is not).

    x_TD: f32 [T, D], contiguous, on a multiple of 16 bytes. x_q: the same (kernels/quantize); may
    be None when gate and up are float. Groups that do not exist cost a launched program each.
    """
    n_tokens = len(x_TD)
    assert x_TD.is_contiguous() and x_TD.shape[1] == expert.d_model, tuple(x_TD.shape)
    tuning = tuning or tune_gate_up(expert, batch_of(n_tokens))
    h, h_q, h_meta, slots_h = _hidden_args(hidden, x_TD)
    q, meta, slots_x = _quantized_args(x_q, x_TD)
    gate_up_kernel[(triton.cdiv(expert.d_expert, tuning.rows), groups.most)](
        groups.addr,
        groups.start,
        groups.entry_row,
        groups.entry_token,
        groups.n_groups,
        x_TD,
        q,
        meta,
        h,
        h_q,
        h_meta,
        E=first_half(expert),
        N=tuning,
        T=n_tokens,
        SLOTS_X=slots_x,
        SLOTS_H=slots_h,
        num_warps=tuning.warps,
        **EXACT,
    )
    _quantize_hidden(expert, hidden)


def down(
    expert: GpuExpert,
    groups: GpuGroups,
    hidden: Hidden,
    rows_RD: torch.Tensor,
    n_tokens: int,
    tuning: RowTuning | None = None,
) -> None:
    """Unweighted rows of the groups, into row r of rows_RD f32 [R, D]. One launch."""
    assert rows_RD.is_contiguous() and rows_RD.shape[1] == expert.d_model, tuple(rows_RD.shape)
    tuning = tuning or tune_down(expert, batch_of(n_tokens))
    h, h_q, h_meta, slots = _hidden_args(hidden, rows_RD)
    down_kernel[(triton.cdiv(expert.d_model, tuning.rows), groups.most)](
        groups.addr,
        groups.start,
        groups.entry_row,
        groups.n_groups,
        h,
        h_q,
        h_meta,
        rows_RD,
        E=expert,
        N=tuning,
        T=n_tokens,
        SLOTS=slots,
        num_warps=tuning.warps,
        **EXACT,
    )


def dense_gate_up(
    gate: GpuWeight,
    up: GpuWeight,
    x_TD: torch.Tensor,
    x_q: Quantized | None,
    hidden: Hidden,
    tuning: RowTuning | None = None,
) -> None:
    """silu(gate x) * (up x) of every token into ``hidden`` (made for ``dense_expert``)."""
    n_tokens = len(x_TD)
    assert x_TD.is_contiguous() and x_TD.shape[1] == gate.n_cols, tuple(x_TD.shape)
    expert = dense_expert(gate, up, hidden.h_q is not None)
    tuning = tuning or tune_gate_up(expert, n_tokens)
    h, h_q, h_meta, slots_h = _hidden_args(hidden, x_TD)
    q, meta, slots_x = _quantized_args(x_q, x_TD)
    dense_gate_up_kernel[(triton.cdiv(expert.d_expert, tuning.rows),)](
        gate.data.data_ptr(),
        up.data.data_ptr(),
        gate.scale,
        up.scale,
        x_TD,
        q,
        meta,
        h,
        h_q,
        h_meta,
        E=expert,
        N=tuning,
        T=n_tokens,
        SLOTS_X=slots_x,
        SLOTS_H=slots_h,
        num_warps=tuning.warps,
        **EXACT,
    )
    _quantize_hidden(expert, hidden)


def _hidden_args(
    hidden: Hidden, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """h, q, meta, slots; ``other`` stands for what is not there."""
    q, meta, slots = _quantized_args(hidden.h_q, other)
    return (other if hidden.h is None else hidden.h), q, meta, slots


def _quantized_args(
    x_q: Quantized | None, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """q, meta, slots of a row."""
    return (other, other, 0) if x_q is None else (x_q.q, x_q.meta, x_q.q.shape[1])


def _quantize_hidden(expert: GpuExpert, hidden: Hidden) -> None:
    """The launch that float gate or up rows need before a quantized down."""
    if expert.tiles_out and not expert.tiles_in:
        assert hidden.h is not None and hidden.h_q is not None, "hidden of another expert"
        quantize(hidden.h, hidden.h_q)
