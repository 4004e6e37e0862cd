"""The operations that models are made of, as one bundle of functions. Knows no models.

A mixer calls ``ops.rms_norm(...)`` and does not know which implementation answers.
``reference_ops`` is the plain torch truth; whoever builds an engine replaces single fields
(``dataclasses.replace``) by native or Triton versions that keep the op's contract, which stands
in the docstring of its folder. Ops with an ``out`` argument, or that work in place, write into
contiguous buffers that the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.kernels.attention import attention
from strata.kernels.combine import combine_all, copy_rows
from strata.kernels.embed import lookup
from strata.kernels.gdn import ConvWeights, gated_norm, inputs, recurrence
from strata.kernels.hyper import mix, read_gates, write
from strata.kernels.linear import linear
from strata.kernels.ngram import add_convolved, gated_value
from strata.kernels.pointwise import sigmoid_times, silu_times
from strata.kernels.qsa import append_keys, select_blocks, token_mask
from strata.kernels.rms_norm import rms_norm
from strata.kernels.rotary import RotaryLike, head_rotary
from strata.kernels.router import RouteRule, route_rows
from strata.kernels.weight import Weight

Tensor = torch.Tensor


class RmsNormOp(Protocol):
    """``kernels/rms_norm``."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, groups: int = 1, out: Tensor | None = None
    ) -> Tensor:
        """Normalise the last axis of x, in ``groups`` equal parts."""
        ...


class AttentionOp(Protocol):
    """``kernels/attention``."""

    def __call__(
        self,
        q_THd: Tensor,
        k_nGd: Tensor,
        v_nGv: Tensor,
        start: int,
        scale: float,
        window_tokens: int | None = None,
        sinks_H: Tensor | None = None,
        selected_Tn: Tensor | None = None,
        out_THv: Tensor | None = None,
        /,
    ) -> Tensor:
        """Causal attention of the window's tokens over the cache, [T, H, dv]."""
        ...


class SelectOp(Protocol):
    """``kernels/qsa`` select_blocks."""

    def __call__(
        self,
        q_TId: Tensor,
        key_Bd: Tensor,
        start: int,
        block_tokens: int,
        budget_blocks: int,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        """Kept blocks of every token, int32 [T, budget_blocks]."""
        ...


class RecurrenceOp(Protocol):
    """``kernels/gdn`` recurrence."""

    def __call__(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_TJV: Tensor,
        keep_TJ: Tensor,
        beta_TJ: Tensor,
        key_head_J: Tensor,
        state_in_JKV: Tensor,
        state_out_JKV: Tensor,
        out_TJV: Tensor | None = None,
        /,
    ) -> Tensor:
        """The gated delta rule over T tokens, [T, J, V]."""
        ...


class GatedNormOp(Protocol):
    """``kernels/gdn`` gated_norm."""

    def __call__(
        self,
        o_TJV: Tensor,
        z_TJV: Tensor,
        weight_V: Tensor,
        eps: float,
        gate: str,
        out: Tensor | None = None,
    ) -> Tensor:
        """Norm over V, times the weight, times silu or sigmoid of z."""
        ...


@dataclass(frozen=True)
class Ops:
    """One implementation of every op."""

    dtype: torch.dtype
    """Activations: float32, or float64 for reference runs."""
    linear: Callable[[Tensor, Weight], Tensor]
    """(x_TK, w) -> [T, n_rows]: every row times w, ``kernels/linear``."""
    rms_norm: RmsNormOp
    lookup: Callable[[Weight, Tensor, torch.dtype], Tensor]
    """(table, ids, dtype) -> [*ids.shape, n_cols], ``kernels/embed``."""
    # residual streams, kernels/hyper
    read_gates: Callable[[Tensor, Tensor | None, int], None]
    """(low_TR, coeff_TC or None, n_streams), in place."""
    stream_mix: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(normed_TCD, gate_TCD, out_TD) -> out."""
    stream_write: Callable[[Tensor, Tensor, Tensor], None]
    """(streams_TCD, y_TD, coeff_TC), in place."""
    # attention, kernels/rotary, kernels/attention and kernels/qsa
    head_rotary: Callable[[Tensor, Tensor | None, float, int, RotaryLike, Tensor], None]
    """(x_THd, norm weight or None, eps, start, spec, out_THd)."""
    attention: AttentionOp
    append_keys: Callable[[Tensor, int, Tensor, int, Tensor, float, RotaryLike, Tensor], None]
    """(ring_Xd, start, raw_Td, block_tokens, weight_d, eps, spec, key_Bd)."""
    select_blocks: SelectOp
    token_mask: Callable[[Tensor, int, int, int], Tensor]
    """(blocks_Tm, start, n, block_tokens) -> bool [T, n]."""
    # linear attention, kernels/gdn
    gdn_inputs: Callable[[Tensor, int, Tensor, Tensor, Tensor, ConvWeights, Sequence[Tensor]], None]
    """(ring_XN, start, columns_TN, a_TJ, b_TJ, w, (q, k, v, keep, beta))."""
    gdn_recurrence: RecurrenceOp
    gated_norm: GatedNormOp
    # n-gram block, kernels/ngram
    ngram_gate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(key_TCD, query_TCD, value_TD) -> u_TCD, gated_value."""
    ngram_conv: Callable[[Tensor, int, Tensor, Tensor, int, Tensor, Tensor], None]
    """(ring_XN, start, column_TN, taps_PN, dilation, u_TN, residual_TN), add_convolved."""
    # feed-forward, kernels/router, kernels/combine and kernels/pointwise
    route: Callable[[Tensor, RouteRule, Tensor | None, Tensor | None, Tensor, Tensor], None]
    """(logits_TE, rule, bias_E, correction_E, expert_R, weight_R), route_rows."""
    combine: Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
    """(rows_RD, weight_TK, shared_TD or None, out_TD), combine_all."""
    copy_rows: Callable[[npt.NDArray[np.int32], Tensor, Tensor], None]
    """(index, source_RD, out_RD)."""
    silu_times: Callable[[Tensor, Tensor], None]
    """(gate_TF, up_TF): gate becomes silu(gate) * up."""
    sigmoid_times: Callable[[Tensor, Tensor], None]
    """(y, gate): y becomes y * sigmoid(gate)."""
    linear_group: Callable[[Tensor, Sequence[Weight], Sequence[Tensor]], None] | None = None
    """Several products of the same rows at once; None: one after the other."""

    def linears(self, x_TK: Tensor, ws: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """outs[i] = linear(x, ws[i]); outs contiguous, of T * n_rows numbers in any shape."""
        if self.linear_group is not None:
            self.linear_group(x_TK, ws, outs)
            return
        for w, out in zip(ws, outs, strict=True):
            out.copy_(self.linear(x_TK, w).view_as(out))


def reference_ops(dtype: torch.dtype = torch.float32) -> Ops:
    """The plain torch ops for activations of that dtype (float32 or float64).

    ``linear`` decodes the weights to dtype for every product and does not round activations.
    """
    return Ops(
        dtype=dtype,
        linear=lambda x, w: linear(x, w, dtype),
        rms_norm=rms_norm,
        lookup=lookup,
        read_gates=read_gates,
        stream_mix=mix,
        stream_write=write,
        head_rotary=head_rotary,
        attention=attention,
        append_keys=append_keys,
        select_blocks=select_blocks,
        token_mask=token_mask,
        gdn_inputs=inputs,
        gdn_recurrence=recurrence,
        gated_norm=gated_norm,
        ngram_gate=gated_value,
        ngram_conv=add_convolved,
        route=route_rows,
        combine=combine_all,
        copy_rows=copy_rows,
        silu_times=silu_times,
        sigmoid_times=sigmoid_times,
    )
