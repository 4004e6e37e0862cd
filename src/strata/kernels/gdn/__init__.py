"""gdn: the pieces of a Gated DeltaNet layer between its projections.

Letters here: N conv channels ([q | k | v]), P conv taps, J value heads, H key heads, K key dim,
V value dim.

causal_conv(past_XN, x_TN, taps_PN, dilation) -> y_TN
    y[t] = silu( sum over j ascending of taps[j] * column(t - dilation * (P - 1 - j)) )
    Tap P - 1 is the current token. Columns before x come from past: X = dilation * (P - 1) rows,
    oldest first.
l2_norm(x_THK) -> x * rsqrt(sum(x^2) + 1e-6)
gates(a_TJ, b_TJ, decay_J, dt_bias_J) -> (keep_TJ, beta_TJ)
    keep = exp(decay * softplus(a + dt_bias)), decay = -exp(A_log);   beta = sigmoid(b)
inputs(ring_XN, start, columns_TN, a_TJ, b_TJ, w, (q, k, v, keep, beta))
    All of the above from the projections' columns [q | k | v] at positions start and up: columns
    before start come from the ring (kernels/ring.py), these go into it; q = l2_norm / sqrt(K),
    k = l2_norm, v, keep and beta are written where they are wanted.
recurrence(q_THK, k_THK, v_TJV, keep_TJ, beta_TJ, key_head_J, state_in_JKV, state_out_JKV) -> o_TJV
    q and k are normalised (q also divided by sqrt(K)); value head j uses key head key_head[j]
    (int32 or int64). Per token and value head, from M = state_in:
        M = keep * M;   u = beta * (v - M^T k);   M = M + k u^T;   o = M^T q
    The last M goes into state_out, which is state_in itself or does not overlap it. o goes into a
    last argument ``out`` if given, as in gated_norm.
gated_norm(o_TJV, z_TJV, weight_V, eps, gate) -> o * rsqrt(mean(o^2) + eps) * weight * gate(z)
    gate: "silu" or "sigmoid".

Promise: a token's result, and the state after it, have the same bits for every T; n tokens run at
once equal the same n run in any split. Implementations may differ from each other by rounding.
Source: the layer as transformers computes it token by token (Qwen3-Next, Qwen3.5, Qwen4-Exp).
"""

from strata.kernels.gdn.ref import (
    ConvWeights,
    causal_conv,
    gated_norm,
    gates,
    inputs,
    l2_norm,
    recurrence,
)

__all__ = [
    "ConvWeights",
    "causal_conv",
    "gated_norm",
    "gates",
    "inputs",
    "l2_norm",
    "recurrence",
]
