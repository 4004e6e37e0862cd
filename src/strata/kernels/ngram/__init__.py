"""ngram: how strongly the n-gram value enters each residual stream.

gate(key_TCD, query_TCD) -> [T, C], of normed key and query
    s = <key_c, query_c> / sqrt(D);   gate = sigmoid( sign(s) * sqrt(max(|s|, 1e-6)) )

Promise: a token's result has the same bits for every T.
Source: the PLE layer of Qwen4-Exp in transformers. Its convolution is kernels/gdn's.
"""

from strata.kernels.ngram.ref import gate

__all__ = ["gate"]
