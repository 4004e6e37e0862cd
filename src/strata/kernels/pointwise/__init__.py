"""pointwise: exp, sigmoid, silu and softplus whose result for an element depends on it alone.

silu_times and sigmoid_times multiply in place: the middle of a gated feed-forward, an output gate.

Input   any float tensor; the last axis is the row. Output: a tensor of the same shape and dtype.
Promise the bits of an element are the same whatever the shape around it (a window of one token, a
        chunk of 500), as long as torch runs on one thread. torch alone does not promise that: it
        computes the last few elements of a tensor with scalar code, whose exp differs from the
        vector one's in the last bit.
"""

from strata.kernels.pointwise.ref import (
    exp,
    sigmoid,
    sigmoid_times,
    silu,
    silu_times,
    softplus,
)

__all__ = ["exp", "sigmoid", "sigmoid_times", "silu", "silu_times", "softplus"]
