"""ngram: how strongly the n-gram value enters each residual stream.

gate(key_TCD, query_TCD) -> [T, C], of normed key and query
    s = <key_c, query_c> / sqrt(D);   gate = sigmoid( sign(s) * sqrt(max(|s|, 1e-6)) )
gated_value(key, query, value_TD) -> u_TCD = gate * value
add_convolved(ring_XN, start, column_TN, taps_PN, dilation, u_TN, residual_TN), N = C * D
    residual += u + causal_conv(columns before start from the ring, column); then the columns go
    into the ring

Promise: a token's result has the same bits for every T.
Source: the PLE layer of Qwen4-Exp in transformers. Its convolution is kernels/gdn's.
"""

from strata.kernels.ngram.ref import add_convolved, gate, gated_value

__all__ = ["add_convolved", "gate", "gated_value"]
