"""What a device has found out about a window's logits, so that nobody need read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """After each of T tokens: the id of the highest logit (of equal ones the lowest id), and
    whether all logits are finite."""

    best_T: list[int]
    finite_T: list[bool]
