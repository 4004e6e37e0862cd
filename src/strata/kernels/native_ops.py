"""Ops by native code: products, attention and recurrence in the pool, the rest on the caller's
thread. float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strata.kernels.embed.native import lookup
from strata.kernels.gdn import ConvWeights
from strata.kernels.ops import Ops
from strata.kernels.rotary import RotaryLike
from strata.kernels.rotary.tables import TablesBySpec
from strata.kernels.router import RouteRule
from strata.native import CpuPool
from strata.native.fused import Fused, GdnSizes
from strata.native.fused_heads import FusedHeads
from strata.native.fused_routing import FusedRouting

Tensor = torch.Tensor


class _Heads:
    """The operations that need rotary tables."""

    def __init__(self, heads: FusedHeads) -> None:
        self._heads = heads
        self._tables = TablesBySpec()

    def head_rotary(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        start: int,
        spec: RotaryLike,
        out: Tensor,
    ) -> None:
        self._heads.head_rotary(x, weight, eps, start, self._tables(spec), out)

    def append_keys(
        self, ring: Tensor, start: int, raw: Tensor, block_tokens: int, weight: Tensor, eps: float,
        spec: RotaryLike, keys: Tensor,
    ) -> None:  # fmt: skip
        tables = self._tables(spec)
        self._heads.append_keys(ring, start, raw, block_tokens, weight, eps, tables, keys)


def native_ops(pool: CpuPool) -> Ops:
    """All ops for one pool, with its instruction set."""
    rows, heads = Fused(pool.isa), FusedHeads(pool.isa)
    mixers, routing = _Heads(heads), FusedRouting(pool.isa)

    def gdn_inputs(
        ring: Tensor, start: int, columns: Tensor, a: Tensor, b: Tensor, w: ConvWeights,
        out: Sequence[Tensor],
    ) -> None:  # fmt: skip
        sizes = GdnSizes(w.n_k_heads, w.n_v_heads, w.k_dim, w.v_dim)
        rows.gdn_inputs(ring, start, columns, w.taps_PN, a, b, w.decay_J, w.dt_bias_J, sizes, out)

    def route(
        logits: Tensor, rule: RouteRule, bias: Tensor | None, correction: Tensor | None,
        expert: Tensor, weight: Tensor,
    ) -> None:  # fmt: skip
        routing.route(
            logits, bias, rule.n_active, rule.scoring, rule.normalize, rule.scale, correction,
            rule.n_groups, rule.groups_kept, expert, weight,
        )  # fmt: skip

    return Ops(
        dtype=torch.float32,
        linear=lambda x, w: pool.linear(w, x),
        rms_norm=rows.rms_norm,
        lookup=lookup,
        read_gates=rows.read_gates,
        stream_mix=rows.stream_mix,
        stream_write=rows.stream_write,
        head_rotary=mixers.head_rotary,
        attention=pool.attention,
        append_keys=mixers.append_keys,
        select_blocks=heads.select_blocks,
        token_mask=heads.token_mask,
        gdn_inputs=gdn_inputs,
        gdn_recurrence=pool.gdn_recurrence,
        gated_norm=rows.gated_norm,
        ngram_gate=rows.ngram_gate,
        ngram_conv=rows.ngram_conv,
        route=route,
        combine=rows.combine,
        copy_rows=rows.copy_rows,
        silu_times=rows.silu_times,
        sigmoid_times=rows.sigmoid_times,
        linear_group=lambda x, ws, outs: pool.linears(ws, x, outs),
    )
