"""The greedy choice in plain torch."""

from __future__ import annotations

import torch


def argmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """Lowest id of the highest logit, int32 [T]."""
    least = torch.full_like(logits_TV, float("-inf"))
    usable_TV = torch.where(logits_TV.isnan(), least, logits_TV)
    # torch's argmax leaves the order of ties open
    is_best_TV = (usable_TV == usable_TV.amax(-1, keepdim=True)) & ~logits_TV.isnan()
    return (
        is_best_TV.to(torch.uint8)
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, 0]
        .to(torch.int32)
    )
