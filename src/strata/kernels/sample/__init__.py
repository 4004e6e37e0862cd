"""sample: the greedy choice.

argmax(logits_TV) -> int32 [T]
    id of the highest logit of every row; of equal ones the lowest id. -0 and +0 are equal. NaN is
    never chosen before a number; a row of NaN alone gives 0.
The device's form (``sample.triton.choose``) also counts the logits that are not finite, so that
nobody needs to read them to find out.
"""

from strata.kernels.sample.ref import argmax

__all__ = ["argmax"]
