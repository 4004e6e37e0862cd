"""The operations that models are made of, as one bundle of functions. Knows no models.

A mixer calls ``ops.rms_norm(...)`` and does not know which implementation answers.
``reference_ops`` is the plain torch truth; whoever builds an engine replaces single fields
(``dataclasses.replace``) by native or Triton versions that keep the op's contract, which stands
in the docstring of its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from strata.kernels.attention import attention
from strata.kernels.gdn import causal_conv, gated_norm, gates, recurrence
from strata.kernels.hyper import mix
from strata.kernels.linear import linear
from strata.kernels.qsa import block_keys, select_blocks
from strata.kernels.rms_norm import rms_norm
from strata.kernels.rotary import RotaryLike, rotary
from strata.kernels.weight import Weight

Tensor = torch.Tensor


class RmsNormOp(Protocol):
    """``kernels/rms_norm``."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
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
        /,
    ) -> Tensor:
        """Causal attention of the window's tokens over the cache, [T, H, dv]."""
        ...


@dataclass(frozen=True)
class Ops:
    """One implementation of every op."""

    dtype: torch.dtype
    """Activations: float32, or float64 for reference runs."""
    linear: Callable[[Tensor, Weight], Tensor]
    """(x_TK, w) -> [T, n_rows]: every row times w, ``kernels/linear``."""
    rms_norm: RmsNormOp
    rotary: Callable[[Tensor, Tensor, RotaryLike], Tensor]
    """(x_THd, pos_T, spec) -> [T, H, d], ``kernels/rotary``."""
    attention: AttentionOp
    block_keys: Callable[[Tensor, Tensor, float, Tensor, RotaryLike], Tensor]
    """(raw_mrd, weight_d, eps, first_m, spec) -> [m, d], ``kernels/qsa``."""
    select_blocks: Callable[[Tensor, Tensor, int, int, int], Tensor]
    """(q_TId, key_Bd, start, block_tokens, budget_blocks) -> [T, budget], ``kernels/qsa``."""
    causal_conv: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """(past_XN, x_TN, taps_PN, dilation) -> [T, N], silu included, ``kernels/gdn``."""
    gdn_gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(a_TJ, b_TJ, decay_J, dt_bias_J) -> (keep_TJ, beta_TJ), ``kernels/gdn``."""
    gdn_recurrence: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
    ]
    """(q_THK, k_THK, v_TJV, keep_TJ, beta_TJ, key_head_J, state_in, state_out) -> [T, J, V],
    ``kernels/gdn``."""
    gated_norm: Callable[[Tensor, Tensor, Tensor, float, str], Tensor]
    """(o_TJV, z_TJV, weight_V, eps, "silu" or "sigmoid") -> [T, J, V], ``kernels/gdn``."""
    stream_mix: Callable[[Tensor, Tensor], Tensor]
    """(normed_TCD, gate_TCD) -> [T, D], ``kernels/hyper``."""


def reference_ops(dtype: torch.dtype = torch.float32) -> Ops:
    """The plain torch ops for activations of that dtype (float32 or float64).

    ``linear`` decodes the weights to dtype for every product and does not round activations.
    """
    return Ops(
        dtype=dtype,
        linear=lambda x, w: linear(x, w, dtype),
        rms_norm=rms_norm,
        rotary=rotary,
        attention=attention,
        block_keys=block_keys,
        select_blocks=select_blocks,
        causal_conv=causal_conv,
        gdn_gates=gates,
        gdn_recurrence=recurrence,
        gated_norm=gated_norm,
        stream_mix=mix,
    )
