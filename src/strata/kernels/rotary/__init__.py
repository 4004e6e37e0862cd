"""rotary: rotary position embedding of the first dims of every head.

    c = cos(pos[t] * inv_freq[i]) * attention_factor;  s = the same with sin
    (a, b) -> (a * c - b * s, b * c + a * s)
    (a, b) = dims (i, i + n) of the head for pairing "half", dims (2i, 2i + 1) for "pairs"

x_THd: [T, H, d], any float dtype, d >= 2n with n = len(inv_freq); dims from 2n on pass unchanged.
pos_T: [T] int64 positions >= 0. spec: inv_freq, pairing and attention_factor (models' RotarySpec).
Returns a new contiguous [T, H, d].

head_rotary(x_THd, weight_d, eps, start, spec, out_THd)
    out = rotary of rms_norm(x, weight, eps) (weight None: of x) at positions start, start + 1, ...,
    rounded to out's dtype; out may be x or a slice of a cache.

Angles, cos and sin are float64 and rounded once to x's dtype, so they are as good at position
262,143 as at 1. They come from tables of 256 positions each: a token's bits do not depend on T.
Source: Su et al. 2021 (arXiv 2104.09864).
"""

from strata.kernels.rotary.ref import RotaryLike, head_rotary, rotary

__all__ = ["RotaryLike", "head_rotary", "rotary"]
