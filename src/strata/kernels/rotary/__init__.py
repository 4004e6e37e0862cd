"""rotary: rotary position embedding of the first dims of every head.

    angle(t, i) = pos[t] * inv_freq[i];  c = cos(angle) * attention_factor;  s = sin(angle) * attention_factor
    (a, b) -> (a * c - b * s, b * c + a * s)       (a, b) = dims (i, i + n) "half" or (2i, 2i + 1) "pairs"

x_THd: [T, H, d], any float dtype, d >= 2n with n = len(inv_freq); dims from 2n on pass through unchanged.
pos_T: [T] int64 positions >= 0. spec: anything with inv_freq, pairing and attention_factor (models' RotarySpec).
Returns a new [T, H, d]. Angles, cos and sin are float64, rounded once to x's dtype: exact to the last bit or so at any
position. They come from tables of 256 positions each, so a token's bits do not depend on T.
Source: Su et al. 2021 (arXiv 2104.09864).
"""

from strata.kernels.rotary.ref import RotaryLike, rotary

__all__ = ["RotaryLike", "rotary"]
