# mypy: allow-untyped-defs, allow-untyped-decorators
"""One token's result from its experts' rows, and its way into the residual: one GPU launch.

The sum is that of ``ref.combine``, bit for bit: rank order, two roundings a rank. A row is read
where its place says: rows of the CPU from memory that the host wrote and the device can read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from strata.core.types import Place
from strata.kernels.triton_common import EXACT, sigmoid_like

ON_TIME = (Place.FAST, Place.PCIE, Place.CPU, Place.REMOTE)
"""Places whose rows belong to their own layer's sum."""

_CPU = tl.constexpr(int(Place.CPU))
_CPU_LATE = tl.constexpr(int(Place.CPU_LATE))
_BLOCK = 128


@triton.jit
def combine_kernel(
    rows, cpu_rows, weight, place, shared, shared_gate, out, residual, coeff,
    D: tl.constexpr, K: tl.constexpr, STREAMS: tl.constexpr, TAKEN: tl.constexpr,
    HAS_PLACE: tl.constexpr, HAS_CPU: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p): columns p * BLOCK .. of token t. TAKEN: bit c is set when place c counts."""
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = d < D
    # every load is asked for before any is used
    weights = ()
    codes = ()
    for j in tl.static_range(K):
        weights = weights + (tl.load(weight + t * K + j),)
        if HAS_PLACE:
            codes = codes + (tl.load(place + t * K + j).to(tl.int32),)
    streams = ()
    coeffs = ()
    for c in tl.static_range(STREAMS):
        streams = streams + (tl.load(residual + (t * STREAMS + c) * D + d, mask=ok, other=0.0),)
        if STREAMS > 1:
            coeffs = coeffs + (tl.load(coeff + t * STREAMS + c),)
    acc = tl.zeros((BLOCK,), tl.float32)
    if HAS_SHARED:
        acc = tl.load(shared + t * D + d, mask=ok, other=0.0)
    values = ()
    for j in tl.static_range(K):
        r = t * K + j
        p = rows + r * D
        if HAS_CPU:
            by_host = (codes[j] == _CPU) | (codes[j] == _CPU_LATE)
            address = tl.where(by_host, cpu_rows + r * (D * 4), p.to(tl.int64))
            p = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16 if D % 4 == 0 else 4)
        # the device's own rows are there, whether they count or not: no wait for the place
        wanted = ((TAKEN >> codes[j]) & 1) != 0 if HAS_CPU else True
        values = values + (tl.load(p + d, mask=ok & wanted, other=0.0),)
    if HAS_SHARED and HAS_GATE:
        gate = tl.load(shared_gate + t + tl.zeros((BLOCK,), tl.int32))
        acc = sigmoid_like(tl.full((BLOCK,), 1.0, tl.float32), gate) * acc
    for j in tl.static_range(K):
        added = acc + values[j] * weights[j]
        if HAS_PLACE:
            added = tl.where(((TAKEN >> codes[j]) & 1) != 0, added, acc)
        acc = added
    if HAS_OUT:
        tl.store(out + t * D + d, acc, mask=ok)
    for c in tl.static_range(STREAMS):
        part = acc
        if STREAMS > 1:
            part = acc * coeffs[c]
        tl.store(residual + (t * STREAMS + c) * D + d, streams[c] + part, mask=ok)


def combine(
    rows_RD: torch.Tensor,
    weight_R: torch.Tensor,
    n_tokens: int,
    *,
    place_R: torch.Tensor | None = None,
    places: Sequence[Place] = ON_TIME,
    cpu_rows: int | None = None,
    shared_TD: torch.Tensor | None = None,
    shared_gate_T: torch.Tensor | None = None,
    out_TD: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    coeff_TC: torch.Tensor | None = None,
) -> None:
    """acc[t] = shared[t] or +0, plus weight * row of each rank whose place counts. One launch.

    rows_RD: f32 [T * K, D]. weight_R: f32 [T * K]. place_R: int8 or int32 place codes; None: every
    row counts. places: those that count; what other rows hold does not matter. cpu_rows: address of
    f32 [R, D] that the device can read, a multiple of 16, where rows of CPU and CPU_LATE lie; only
    with place_R; None: in rows_RD too.
    shared_gate_T: f32 logits; shared is multiplied by their sigmoid. out_TD: receives acc.
    residual: [T, D] receives + acc; with coeff_TC [T, C]: [T, C, D], stream c receives
    + coeff[c] * acc. All contiguous.
    """
    d_model, n_active = rows_RD.shape[1], weight_R.numel() // n_tokens
    assert weight_R.numel() == n_tokens * n_active and len(rows_RD) >= n_tokens * n_active
    assert cpu_rows is None or place_R is not None, "cpu_rows without place_R"
    tensors = (rows_RD, weight_R, place_R, shared_TD, shared_gate_T, out_TD, residual, coeff_TC)
    assert all(x is None or x.is_contiguous() for x in tensors), "contiguous tensors only"
    streams = 0 if residual is None else 1 if coeff_TC is None else coeff_TC.shape[1]
    combine_kernel[(n_tokens, triton.cdiv(d_model, _BLOCK))](
        rows_RD,
        0 if cpu_rows is None else cpu_rows,
        weight_R,
        weight_R if place_R is None else place_R,
        rows_RD if shared_TD is None else shared_TD,
        weight_R if shared_gate_T is None else shared_gate_T,
        rows_RD if out_TD is None else out_TD,
        rows_RD if residual is None else residual,
        weight_R if coeff_TC is None else coeff_TC,
        D=d_model,
        K=n_active,
        STREAMS=streams,
        TAKEN=sum(1 << place for place in places),
        HAS_PLACE=place_R is not None,
        HAS_CPU=cpu_rows is not None,
        HAS_SHARED=shared_TD is not None,
        HAS_GATE=shared_gate_T is not None,
        HAS_OUT=out_TD is not None,
        BLOCK=_BLOCK,
        num_warps=1,
        **EXACT,
    )
