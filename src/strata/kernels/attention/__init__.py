"""attention: causal softmax attention of one window over the cached keys and values.

Token t of the window stands at position p = start + t. It sees the positions j from
max(0, p + 1 - window_tokens) to p, and of these only the selected ones:

    s[h, j] = scale * <q[t, h], k[j, g]>,  g = h // (H / G);   m = max of all s[h, j] and sinks[h]
    e[h, j] = exp(s[h, j] - m)
    out[t, h] = sum_j e[h, j] v[j, g] / (sum_j e[h, j] + exp(sinks[h] - m))

and the same without the sink terms when there are no sinks.

q_THd: [T, H, d], float32 or float64. k_nGd: [n, G, d] and v_nGv: [n, G, dv], any float dtype,
widened to q's. n = start + T: the caches are cut at the window's last token, so nothing past it
can be read. Heads and dims are contiguous, the row stride is free (v may be the front of k's
rows). window_tokens: None = all. sinks_H: [H] logits or None. selected_Tn: bool [T, n], or None =
all; every token needs at least one position that it sees.
Returns [T, H, dv] in q's dtype, in a last argument ``out`` if given. The work for one token never
involves another token, so its bits do not depend on T; a mask that is true for all it sees gives
the same bits as None.
"""

from strata.kernels.attention.ref import attention

__all__ = ["attention"]
