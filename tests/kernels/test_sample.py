"""The greedy choice by hand: ties, signed zeros, NaN, infinities."""

from __future__ import annotations

import torch

from strata.kernels.sample import argmax

NAN, INF = float("nan"), float("inf")
CASES = [
    ([1.0, 3.0, 3.0, 2.0], 1),
    ([-0.0, 0.0, -1.0, 0.0], 0),
    ([NAN, -5.0, NAN, -4.0], 3),
    ([NAN, NAN, NAN, NAN], 0),
    ([-INF, -INF, NAN, -INF], 0),
    ([NAN, -INF, -INF, -INF], 1),
    ([1.0, INF, INF, NAN], 1),
]


def test_argmax() -> None:
    logits = torch.tensor([row for row, _ in CASES])
    ids = argmax(logits)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [best for _, best in CASES]
