"""hyper: reading and writing the residual streams of hyper-connections, without the dense products.

C streams, D hidden. One READ of S_TCD with dense products down [rank, C*D], up [C*D, rank] and
inject [C, C*D]:
    n = RMS norm of each stream by itself        kernels/rms_norm with groups = C
    a = rank_gate(down n, C)                     silu(y / C)
    x = mix(n, up a)                             mean over the streams of sigmoid(g) * n
    w = coefficients(inject n, C)                2 * sigmoid(y / C), one per stream
read_gates(down n, inject n, C) makes a and w of the products, in place.
x is a mean of the normed streams, not of the raw ones.
The WRITE  write(S, y_TD, w_TC):  S[t, c] += w[t, c] * y[t], in place, on the raw streams.

Promise: a token's result has the same bits for every T (sums over streams ascend).
Source: Qwen4-Exp's gated residual in transformers; the division by C stands inside both
nonlinearities.
"""

from strata.kernels.hyper.ref import coefficients, mix, rank_gate, read_gates, write

__all__ = ["coefficients", "mix", "rank_gate", "read_gates", "write"]
