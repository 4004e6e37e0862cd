"""Op: product of activation rows with a weight matrix, y[t, n] = scale * sum_k w[n, k] x[t, k].

    (x_TK f32, w: Weight [N, K]) -> f32 [T, N]

Weights are read in their storage type, as rows or as tiles (the same bits). Quantized types:
activations become int8 blocks of 32, block dots are exact integers, f32 partial sums have a fixed
order. Float types: f32 activations, 32 partial sums. Numerics:
docs/decisions/001-numerics-contract.md sections 1 to 4, and for the distance to
dequantize-then-multiply its section "Stated rounding". Row t depends neither on the other rows nor
on T.

``linear_contract`` is that arithmetic bit for bit (every kernel equals it); ``linear`` is plain
dequantize-then-multiply in float32 or float64, with unquantized activations.
"""

from strata.kernels.linear.ref import linear, linear_contract

__all__ = ["linear", "linear_contract"]
