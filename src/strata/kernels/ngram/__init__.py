"""ngram: how strongly the n-gram value enters each residual stream.

gate(key_TCD, query_TCD) -> [T, C]
    s = <key_c, query_c> / sqrt(D);   gate = sigmoid( sign(s) * sqrt(max(|s|, 1e-6)) );   key and query are normed

Promise: a token's result has the same bits for every T.
Source: the PLE layer of Qwen4-Exp in transformers. Its convolution is kernels/gdn's, its norms are kernels/hyper's.
"""

from strata.kernels.ngram.ref import gate

__all__ = ["gate"]
