"""mla: the pieces of multi-head latent attention (DeepSeek V2, V3) around its attention.

Letters: H heads, c latent width (kv_lora_rank), r rotated dims, p plain dims of a head's query, v
value dims of a head.

append_rows(row_TN, norm_c, eps, start, spec, cache_nN)
    row = [latent | k_rope] as projected, N = c + r. The cache's entries start and up become
    [rms_norm(latent) * norm | rotary(k_rope)].
absorbed(q_THd, k_b_Hpc, start, spec) -> [T, H, c + r]
    q = [q_nope | q_rope] of p + r dims: [q_nope k_b[h] | rotary(q_rope)].
expanded(mixed_THc, v_b_Hvc) -> [T, H, v]
    v_b[h] mixed[t, h].

Between the two stands ``kernels/attention`` with one key/value head: rows are the keys, their first
c numbers the values. One token at a time: a token's bits do not depend on T.
"""

from strata.kernels.mla.ref import absorbed, append_rows, expanded

__all__ = ["absorbed", "append_rows", "expanded"]
