# mypy: allow-untyped-defs, allow-untyped-decorators
"""Expert feed-forwards of many tokens on tensor cores (``--numerics fast``), grouped by expert.

Three launches: gate and up with the activation, the hidden rows as f16, down. Operands as in
``linear.triton_gemm``. A program owns matrix rows of one expert and goes over the expert's entries;
its weights are decoded once for each TOKENS of them. Groups without entries, and those whose
address is 0 (computed elsewhere), are passed over.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from strata.kernels.expert_rows.launch import GpuExpert, GpuGroups, first_half
from strata.kernels.linear.triton_gemm import GemmTuning, HalfRows, half_rows, half_values
from strata.kernels.triton_common import INTERPRET, activate, interpreted_int


def groups_of_rows(expert_R: torch.Tensor, n_active: int, address_E: torch.Tensor) -> GpuGroups:
    """One group for each expert of address_E (int64 [E]) from the rows' experts (int32 [R]).

    Row r belongs to token r // n_active. Experts outside 0 .. E - 1 belong to no group. Runs on
    expert_R's device without waiting for it.
    """
    n_experts = len(address_E)
    sorted_R, row_R = torch.sort(expert_R, stable=True)
    edges = torch.arange(n_experts + 1, dtype=expert_R.dtype, device=expert_R.device)
    start = torch.searchsorted(sorted_R, edges).to(torch.int32)
    count = torch.full((1,), n_experts, dtype=torch.int32, device=expert_R.device)
    row = row_R.to(torch.int32)
    return GpuGroups(address_E, start, row, row // n_active, count)


@triton.jit
def _bias(blob, OFFSET: tl.constexpr, row, ok):
    """f32 [1, ROWS] at that byte of the blob, or 0."""
    if OFFSET >= 0:
        p = (blob + OFFSET).to(tl.pointer_type(tl.float32))
        return tl.load(p + row, mask=ok, other=0.0)[None, :]
    else:
        return 0.0


@triton.jit
def _scale(E: tl.constexpr, blob, N: tl.constexpr):
    """Factor of gate (0), up (1) or down (2)."""
    if E.scale_offset >= 0:
        return tl.load((blob + E.scale_offset).to(tl.pointer_type(tl.float32)) + N)
    else:
        return 1.0


@triton.jit
def _gate_up_entries(
    E: tl.constexpr, blob, row, entry, last, entry_row, entry_token, x, factor, h,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` of h of the entries that exist among TOKENS from ``entry`` on."""
    K: tl.constexpr = E.d_model
    G: tl.constexpr = E.gate
    U: tl.constexpr = E.up
    i = entry + tl.arange(0, TOKENS)
    ok = i <= last
    token = tl.load(entry_token + i, mask=ok, other=0)
    at = x + token[:, None].to(tl.int64) * K
    g = tl.zeros((TOKENS, ROWS), tl.float32)
    u = tl.zeros((TOKENS, ROWS), tl.float32)
    for k0 in tl.range(0, K, COLS, num_stages=STAGES):
        k = k0 + tl.arange(0, COLS)[None, :]
        x_TK = tl.load(at + k, mask=ok[:, None] & (k < K), other=0.0)
        w_RK = half_values(G, E.gate_is_tiles, blob + E.gate_offset, row, k0, COLS)
        g = tl.dot(x_TK, tl.trans(w_RK), g)
        w_RK = half_values(U, E.up_is_tiles, blob + E.up_offset, row, k0, COLS)
        u = tl.dot(x_TK, tl.trans(w_RK), u)
    power = tl.load(factor + token, mask=ok, other=0.0)[:, None]
    ok_row = row < E.d_expert
    g = g * (power * _scale(E, blob, 0)) + _bias(blob, E.gate_bias_offset, row, ok_row)
    u = u * (power * _scale(E, blob, 1)) + _bias(blob, E.up_bias_offset, row, ok_row)
    KIND: tl.constexpr = E.activation
    y = activate(g, u, KIND, E.swiglu_limit)
    h_row = tl.load(entry_row + i, mask=ok, other=0).to(tl.int64)
    at_h = h + h_row[:, None] * E.d_expert + row[None, :]
    tl.store(at_h, y, mask=ok[:, None] & ok_row[None, :])


@triton.jit
def gate_up_kernel(
    addr, start, entry_row, entry_token, x, factor, h, E: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, g): rows p * ROWS and up of gate and up of group g."""
    group = tl.program_id(1)
    first = tl.load(start + group)
    end = tl.load(start + group + 1)
    blob = tl.load(addr + group)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if blob != 0:
        for entry in range(
            interpreted_int(first) if INTERPRET else first,
            interpreted_int(end) if INTERPRET else end,
            TOKENS,
        ):
            _gate_up_entries(
                E, blob, row, entry, end - 1, entry_row, entry_token, x, factor, h, TOKENS, ROWS,
                COLS, STAGES,
            )  # fmt: skip


@triton.jit
def _down_entries(
    E: tl.constexpr, blob, offset, row, entry, last, entry_row, h, factor, rows,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` of the results of the entries that exist among TOKENS from ``entry`` on."""
    K: tl.constexpr = E.d_expert
    D: tl.constexpr = E.down
    i = entry + tl.arange(0, TOKENS)
    ok = i <= last
    h_row = tl.load(entry_row + i, mask=ok, other=0).to(tl.int64)
    at = h + h_row[:, None] * K
    y = tl.zeros((TOKENS, ROWS), tl.float32)
    for k0 in tl.range(0, K, COLS, num_stages=STAGES):
        k = k0 + tl.arange(0, COLS)[None, :]
        h_TK = tl.load(at + k, mask=ok[:, None] & (k < K), other=0.0)
        w_RK = half_values(D, E.tiles_out, blob + offset, row, k0, COLS)
        y = tl.dot(h_TK, tl.trans(w_RK), y)
    power = tl.load(factor + h_row, mask=ok, other=0.0)[:, None]
    ok_row = row < E.d_model
    y = y * (power * _scale(E, blob, 2)) + _bias(blob, E.down_bias_offset, row, ok_row)
    tl.store(
        rows + h_row[:, None] * E.d_model + row[None, :], y, mask=ok[:, None] & ok_row[None, :]
    )


@triton.jit
def down_kernel(
    addr, start, entry_row, h, factor, rows, offset, E: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, g): rows p * ROWS and up of down of group g; offset: down's in the blob."""
    group = tl.program_id(1)
    first = tl.load(start + group)
    end = tl.load(start + group + 1)
    blob = tl.load(addr + group)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if blob != 0:
        for entry in range(
            interpreted_int(first) if INTERPRET else first,
            interpreted_int(end) if INTERPRET else end,
            TOKENS,
        ):
            _down_entries(
                E, blob, offset, row, entry, end - 1, entry_row, h, factor, rows, TOKENS, ROWS,
                COLS, STAGES,
            )  # fmt: skip


@cache
def _second_half(expert: GpuExpert) -> GpuExpert:
    """What down needs, wherever it lies."""
    return replace(
        expert, gate=expert.down, up=expert.down, gate_offset=0, up_offset=0, down_offset=0,
        gate_bias_offset=-1, up_bias_offset=-1, activation="silu", swiglu_limit=0.0,
    )  # fmt: skip


def tune_rows(n_rows: int, n_groups: int) -> GemmTuning:
    """The rule, from the mean number of entries of a group."""
    mean = n_rows // max(n_groups, 1)
    tokens = 128 if mean > 64 else 64 if mean > 32 else 32
    return GemmTuning(tokens, 64, 64, 4 if tokens < 128 else 8, 3)


def expert_rows_many(
    expert: GpuExpert,
    groups: GpuGroups,
    x: HalfRows,
    h_RF: torch.Tensor,
    h_half: HalfRows,
    rows_RD: torch.Tensor,
    tuning: GemmTuning | None = None,
) -> None:
    """Unweighted rows of all groups into row r of rows_RD f32 [R, D]; others stay. Three launches.

    groups: every group below len(addr) counts (``groups_of_rows``). x: the tokens' activations.
    h_RF f32 [R, F] and h_half: scratch of all R rows.
    """
    n_rows, n_groups = len(rows_RD), groups.most
    assert rows_RD.is_contiguous() and rows_RD.shape[1] == expert.d_model, tuple(rows_RD.shape)
    assert tuple(h_RF.shape) == (n_rows, expert.d_expert) == tuple(h_half.data.shape), h_RF.shape
    assert h_RF.is_contiguous() and x.data.shape[1] == expert.d_model, tuple(x.data.shape)
    tuning = tuning or tune_rows(n_rows, n_groups)
    shape = {
        "TOKENS": tuning.tokens, "ROWS": tuning.rows, "COLS": tuning.cols,
        "STAGES": tuning.stages, "num_warps": tuning.warps,
    }  # fmt: skip
    table = (groups.addr, groups.start, groups.entry_row)
    gate_up_kernel[(triton.cdiv(expert.d_expert, tuning.rows), n_groups)](
        *table, groups.entry_token, x.data, x.factor, h_RF, E=first_half(expert), **shape
    )
    half_rows(h_RF, h_half)
    down_kernel[(triton.cdiv(expert.d_model, tuning.rows), n_groups)](
        *table,
        h_half.data,
        h_half.factor,
        rows_RD,
        expert.down_offset,
        E=_second_half(expert),
        **shape,
    )
