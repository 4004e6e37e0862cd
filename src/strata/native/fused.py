"""The typed face of the small operations between products: checks tensors, passes addresses.

What each operation computes is said by the kernels folder of its name. All tensors are f32 on the
CPU and contiguous, unless said otherwise; results have the same bits for any number of tokens at
once and on any instruction set. Letters: core.types, and the kernels folder's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import EngineError
from strata.native.fused_checks import F32, at, fused_ops


class GdnSizes(NamedTuple):
    """Sizes of a Gated DeltaNet layer."""

    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int


class Fused:
    """The operations for one instruction set, as a CpuPool calls it ("avx512" runs "avx2" here)."""

    def __init__(self, isa: str) -> None:
        self._ops = fused_ops(isa)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        groups: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``kernels/rms_norm``; x of any strides, weight of any float dtype."""
        width, n = x.shape[-1], x.numel()
        if not x.is_contiguous():
            x = x.contiguous()
        if weight.dtype is not F32:
            weight = weight.to(F32)
        if out is None:
            out = torch.empty_like(x)
        self._ops.rms_norm(
            n // width,
            at(x, n, "rms_norm: x"),
            at(weight, width, "rms_norm: weight"),
            groups,
            width // groups,
            eps,
            at(out, n, "rms_norm: out"),
        )
        return out

    def read_gates(
        self, low_TR: torch.Tensor, coeff_TC: torch.Tensor | None, n_streams: int
    ) -> None:
        """``kernels/hyper``: rank_gate of low and coefficients of coeff, in place."""
        n_tokens, rank = low_TR.shape
        coeff = 0
        if coeff_TC is not None:
            coeff = at(coeff_TC, n_tokens * n_streams, "read_gates: coeff")
        low = at(low_TR, n_tokens * rank, "read_gates: low")
        self._ops.read_gates(n_tokens, low, rank, coeff, n_streams)

    def stream_mix(
        self, normed_TCD: torch.Tensor, gate_TCD: torch.Tensor, out_TD: torch.Tensor
    ) -> torch.Tensor:
        """``kernels/hyper`` mix."""
        n_tokens, streams, width = normed_TCD.shape
        n = n_tokens * width
        self._ops.stream_mix(
            n_tokens,
            at(normed_TCD, streams * n, "stream_mix: normed"),
            at(gate_TCD, streams * n, "stream_mix: gate"),
            streams,
            width,
            at(out_TD, n, "stream_mix: out"),
        )
        return out_TD

    def stream_write(
        self, streams_TCD: torch.Tensor, y_TD: torch.Tensor, coeff_TC: torch.Tensor
    ) -> None:
        """``kernels/hyper`` write, in place."""
        n_tokens, streams, width = streams_TCD.shape
        n = n_tokens * width
        self._ops.stream_write(
            n_tokens,
            at(streams_TCD, streams * n, "stream_write: streams"),
            at(y_TD, n, "stream_write: y"),
            at(coeff_TC, n_tokens * streams, "stream_write: coeff"),
            streams,
            width,
        )

    def silu_times(self, gate_TF: torch.Tensor, up_TF: torch.Tensor) -> None:
        """gate becomes silu(gate) * up."""
        n_tokens, width = gate_TF.shape
        n = n_tokens * width
        gate, up = at(gate_TF, n, "silu_times: gate"), at(up_TF, n, "silu_times: up")
        self._ops.silu_times(n_tokens, gate, up, width)

    def sigmoid_times(self, y: torch.Tensor, gate: torch.Tensor) -> None:
        """y [T, ...] becomes y * sigmoid(gate); gate: like y, or [T, 1]."""
        n_tokens, n = y.shape[0], y.numel()
        one_gate = gate.numel() == n_tokens and n != n_tokens
        self._ops.sigmoid_times(
            n_tokens,
            at(y, n, "sigmoid_times: y"),
            at(gate, n_tokens if one_gate else n, "sigmoid_times: gate"),
            n // max(n_tokens, 1),
            one_gate,
        )

    def gated_norm(
        self,
        o_TJV: torch.Tensor,
        z_TJV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: str,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``kernels/gdn`` gated_norm."""
        n_tokens, heads, width = o_TJV.shape
        n = n_tokens * heads * width
        if out is None:
            out = torch.empty_like(o_TJV)
        self._ops.gated_norm(
            n_tokens,
            at(o_TJV, n, "gated_norm: o"),
            at(z_TJV, n, "gated_norm: z"),
            at(weight_V, width, "gated_norm: weight"),
            heads,
            width,
            eps,
            gate == "silu",
            at(out, n, "gated_norm: out"),
        )
        return out

    def combine(
        self,
        rows_RD: torch.Tensor,
        weight_TK: torch.Tensor,
        shared_TD: torch.Tensor | None,
        out_TD: torch.Tensor,
    ) -> None:
        """``kernels/combine`` of rows that are all valid."""
        n_tokens, n_active = weight_TK.shape
        width = out_TD.shape[1]
        n = n_tokens * width
        self._ops.combine(
            n_tokens,
            at(rows_RD, n * n_active, "combine: rows"),
            at(weight_TK, n_tokens * n_active, "combine: weight"),
            n_active,
            width,
            0 if shared_TD is None else at(shared_TD, n, "combine: shared"),
            at(out_TD, n, "combine: out"),
        )

    def copy_rows(
        self, index_n: npt.NDArray[np.int32], source_RD: torch.Tensor, out_RD: torch.Tensor
    ) -> None:
        """out[i] = source[i] for every i of the index."""
        n_rows, width = out_RD.shape
        if index_n.dtype != np.int32 or not index_n.flags.c_contiguous:
            raise EngineError(f"copy_rows: index is {index_n.dtype}, expected contiguous int32")
        source = at(source_RD, n_rows * width, "copy_rows: source")
        out = at(out_RD, n_rows * width, "copy_rows: out")
        index = index_n.ctypes.data
        wrong = self._ops.copy_rows(len(index_n), index, source, out, n_rows, width)
        if wrong >= 0:
            raise EngineError(
                f"copy_rows: index holds {index_n[wrong]}, allowed is 0 .. {n_rows - 1}"
            )

    def gdn_inputs(
        self,
        ring_XN: torch.Tensor,
        start: int,
        columns_TN: torch.Tensor,
        taps_PN: torch.Tensor,
        a_TJ: torch.Tensor,
        b_TJ: torch.Tensor,
        decay_J: torch.Tensor,
        dt_bias_J: torch.Tensor,
        sizes: GdnSizes,
        out: Sequence[torch.Tensor],
    ) -> None:
        """``kernels/gdn`` inputs; out: q, k, v, keep, beta."""
        n_tokens, n = columns_TN.shape
        n_k, n_v, k_dim, v_dim = sizes
        taps, entries = taps_PN.shape[0], ring_XN.shape[0]
        if n != 2 * n_k * k_dim + n_v * v_dim or entries < taps - 1:
            raise EngineError(f"gdn_inputs: {n} channels, {entries} ring entries, sizes {sizes}")
        q, k, v, keep, beta = out
        self._ops.gdn_inputs(
            n_tokens,
            at(ring_XN, entries * n, "gdn_inputs: ring"),
            entries,
            start,
            at(columns_TN, n_tokens * n, "gdn_inputs: columns"),
            at(taps_PN, taps * n, "gdn_inputs: taps"),
            taps,
            at(a_TJ, n_tokens * n_v, "gdn_inputs: a"),
            at(b_TJ, n_tokens * n_v, "gdn_inputs: b"),
            at(decay_J, n_v, "gdn_inputs: decay"),
            at(dt_bias_J, n_v, "gdn_inputs: dt_bias"),
            n_k,
            n_v,
            k_dim,
            v_dim,
            at(q, n_tokens * n_k * k_dim, "gdn_inputs: q"),
            at(k, n_tokens * n_k * k_dim, "gdn_inputs: k"),
            at(v, n_tokens * n_v * v_dim, "gdn_inputs: v"),
            at(keep, n_tokens * n_v, "gdn_inputs: keep"),
            at(beta, n_tokens * n_v, "gdn_inputs: beta"),
        )

    def ngram_gate(
        self, key_TCD: torch.Tensor, query_TCD: torch.Tensor, value_TD: torch.Tensor
    ) -> torch.Tensor:
        """``kernels/ngram`` gated value, [T, C, D]."""
        n_tokens, streams, width = key_TCD.shape
        n = n_tokens * width
        u_TCD = torch.empty_like(key_TCD)
        self._ops.ngram_gate(
            n_tokens,
            at(key_TCD, streams * n, "ngram_gate: key"),
            at(query_TCD, streams * n, "ngram_gate: query"),
            at(value_TD, n, "ngram_gate: value"),
            streams,
            width,
            at(u_TCD, streams * n, "ngram_gate: u"),
        )
        return u_TCD

    def ngram_conv(
        self,
        ring_XN: torch.Tensor,
        start: int,
        column_TN: torch.Tensor,
        taps_PN: torch.Tensor,
        dilation: int,
        u_TN: torch.Tensor,
        residual_TN: torch.Tensor,
    ) -> None:
        """``kernels/ngram`` add_convolved: residual += u + convolution, in place."""
        n_tokens, n = column_TN.shape
        taps, entries = taps_PN.shape[0], ring_XN.shape[0]
        if entries < dilation * (taps - 1):
            raise EngineError(f"ngram_conv: {entries} ring entries for {taps} taps * {dilation}")
        self._ops.ngram_conv(
            n_tokens,
            at(ring_XN, entries * n, "ngram_conv: ring"),
            entries,
            start,
            at(column_TN, n_tokens * n, "ngram_conv: column"),
            n,
            at(taps_PN, taps * n, "ngram_conv: taps"),
            taps,
            dilation,
            at(u_TN, n_tokens * n, "ngram_conv: u"),
            at(residual_TN, n_tokens * n, "ngram_conv: residual"),
        )
