"""sample: the greedy choice.

argmax(logits_TV) -> int32 [T]
    id of the highest logit of every row; of equal ones the lowest id. -0 and +0 are equal. NaN is
    never chosen before a number; a row of NaN alone gives 0 (whoever reads logits reports NaN).
"""

from strata.kernels.sample.ref import argmax

__all__ = ["argmax"]
