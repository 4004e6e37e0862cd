"""attention: causal softmax attention of one window over the cached keys and values.

Token t of the window stands at position p = start + t and sees positions max(0, p + 1 - window_tokens) .. p, and of
these only the selected ones:
    s[h, j] = scale * <q[t, h], k[j, h // (H / G)]>
    out[t, h] = sum_j exp(s[h, j] - m) v[j, h // (H / G)] / (sum_j exp(s[h, j] - m) + exp(sink[h] - m))
with m the largest of all s[h, j] and sink[h]; without sinks the last term is absent.

q_THd: [T, H, d]. k_nGd: [n, G, d] and v_nGv: [n, G, dv], n = start + T: the caches cut at the last token of the window
(so nothing past it can be read), in any float dtype; heads and dims contiguous, the row stride is free (v may be the
front of k's rows). sinks_H: [H] logits, or None. selected_Tn: bool [T, n], or None = all; a token needs at least one
visible selected position. window_tokens: None = all.
Returns [T, H, dv] in q's dtype; keys and values are widened to it first. Work on one token never involves another, so
a token's bits do not depend on T. A mask that is true everywhere gives the same bits as None.
"""

from strata.kernels.attention.ref import attention

__all__ = ["attention"]
