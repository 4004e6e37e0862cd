"""rms_norm: root-mean-square normalisation over the last axis.

    y = x * (1 / sqrt(mean(x^2) + eps)) * weight

x: [..., n], any float dtype. weight: [n], the *full* weight (1 + w already applied for centred
norms). groups: the last axis is that many equal parts, each with a mean of its own (weight stays
[n]). Returns x's shape and dtype, in ``out`` if given.
Order: squares, their sum and the root are float64, rounded once to x's dtype, then the two products
in x's dtype. One row never sees another, so a token's bits do not depend on T.
Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from strata.kernels.rms_norm.ref import rms_norm

__all__ = ["rms_norm"]
