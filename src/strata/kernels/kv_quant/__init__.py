"""kv_quant: keys and values of the cache as 8 or 4 bits a number.

encode(x, bits, group) -> (codes, scale);  decode(codes, scale) -> f16

x [..., d] f32: head vectors. scale f16 [..., d / group]: one for each ``group`` neighbours, a power
of two that divides d (``group_of``: a whole vector for 8 bits where d is a power of two, 32 for 4).
    8 bits: codes int8 [..., d];       s = f16(max |x| / 127),     c = rint(x / s), at most 127
    4 bits: codes uint8 [..., d / 2];  s = f16(x_far / -8),        c = rint(x / s) + 8, 0 to 15
x_far is the number of the largest magnitude with its sign (the positive one of two). Byte i of
4-bit codes holds dim 2 i in its low half and 2 i + 1 in its high half. A scale of 0 gives codes of
0 (8 after the shift); NaN or infinity inside a group gives a scale of NaN.
decode: f16(code * s), one rounding; attention over an encoded cache is attention over that.
"""

from strata.kernels.kv_quant.ref import bits_of, decode, encode, group_of

__all__ = ["bits_of", "decode", "encode", "group_of"]
