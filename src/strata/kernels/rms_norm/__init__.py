"""rms_norm: root-mean-square normalisation over the last axis.

    y = x * (1 / sqrt(mean(x^2) + eps)) * weight

x: [..., n], any float dtype; weight: [n], *full* weight (1 + w already applied for centred norms), or
[g * n] for a grouped norm of x [..., g, n] given as x [..., g * n] with ``groups=g``: the mean is taken over each n.
Returns x's shape and dtype. Order: squares and their sum are float64, the two products are in x's dtype; one row never
sees another, so a token's bits do not depend on T. Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from strata.kernels.rms_norm.ref import rms_norm

__all__ = ["rms_norm"]
