"""qsa: block selection of query-sparse attention (the indexer of qwen4_exp).

block_keys(raw_mrd, weight_d, eps, first_m, spec) -> [m, d]
    One key per block of r tokens: the mean of the block's raw index keys, rms_norm, then rotary at
    the position of the block's first token. raw_mrd: [m, r, d] raw keys (no norm, no rotary) in
    position order. weight_d: full norm weight. first_m: [m] int64 positions. The mean adds the
    tokens in order. A key depends on its own r tokens only.

append_keys(ring_Xd, start, raw_Td, block_tokens, weight_d, eps, spec, key_Bd)
    block_keys of the blocks that the tokens at positions start and up complete, into entries of
    key_Bd (any float dtype); raw keys before start come from the ring, these go into it.

select_blocks(q_TId, key_Bd, start, block_tokens, budget_blocks) -> int32 [T, budget_blocks]
    q_TId: [T, I, d] index queries (normed, rotated), float32 or float64. key_Bd: [B, d] keys of the
    blocks complete at the window's end, any float dtype, widened to q's. The query at position
    p = start + t has B_t = (p + 1) // block_tokens complete blocks, with
        score[j] = sum_i relu(<q[t, i], key[j]>) / sqrt(d),  j < B_t
    It keeps the min(budget_blocks, B_t) blocks of the largest scores; of equal scores the lower
    index comes first. Their indices stand in ascending order, the rest of the row is -1.

token_mask(blocks_Tm, start, n, block_tokens) -> bool [T, n]
    The tokens of the kept blocks, and always the (p + 1) % block_tokens tokens of the incomplete
    block.

All three look at one token or block at a time, so a token's bits do not depend on T.
Source: transformers 5.24, models/qwen4_exp (there ties are cut arbitrarily).
"""

from strata.kernels.qsa.ref import append_keys, block_keys, select_blocks, token_mask

__all__ = ["append_keys", "block_keys", "select_blocks", "token_mask"]
