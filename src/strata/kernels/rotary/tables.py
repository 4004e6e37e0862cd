"""Rotary tables for native code: one per embedding, made from the reference's angles."""

from __future__ import annotations

import torch

from strata.kernels.rotary.ref import TABLE_POSITIONS, RotaryLike, table
from strata.native.rotary_tables import RotaryTables


class TablesBySpec:
    """Tables of every embedding asked for, kept as long as this object."""

    def __init__(self) -> None:
        # a spec is kept so that its id is never given to another
        self._known: dict[int, tuple[RotaryLike, RotaryTables]] = {}

    def __call__(self, spec: RotaryLike) -> RotaryTables:
        """The tables of that embedding, f32."""
        found = self._known.get(id(spec))
        if found is None:
            found = self._known[id(spec)] = (spec, _tables(spec))
        return found[1]


def _tables(spec: RotaryLike) -> RotaryTables:
    def make(block: int) -> tuple[torch.Tensor, torch.Tensor]:
        return table(spec.inv_freq, spec.attention_factor, block, torch.float32)

    return RotaryTables(make, TABLE_POSITIONS, len(spec.inv_freq), spec.pairing == "half")
