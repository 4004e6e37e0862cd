"""Device memory that a window's experts from RAM pass through on their way into a product.

Knows no steps and no plan: it is given groups of rows and gives them back with other addresses.
"""

from __future__ import annotations

import torch

from strata.experts.fast_tier import FastTier
from strata.experts.store import ExpertStore
from strata.experts.stream import STAGE_BYTES
from strata.kernels.expert_rows.launch import GpuGroups
from strata.kernels.expert_rows.triton_fetch import fetch


class LinkStage:
    """The memory, and for each window size the addresses of its groups."""

    def __init__(self, store: ExpertStore, tier: FastTier, device: torch.device) -> None:
        self._tier = tier
        blobs = [g.shape.blob_bytes for g in store.layers if g is not None]
        row = -(-max(blobs) // 128) * 128
        slots = min(STAGE_BYTES // row, sum(g.n_experts for g in store.layers if g is not None))
        self._memory = torch.empty((slots, row), dtype=torch.uint8, device=device)
        self._vram_2 = torch.zeros(2, dtype=torch.int64, device=device)
        self._addr: dict[int, torch.Tensor] = {}

    @property
    def n_slots(self) -> int:
        """Experts that fit."""
        return len(self._memory)

    def refresh(self) -> None:
        """Between windows, when the tier changed: which addresses are device memory already."""
        first, n_bytes = self._tier.memory
        self._vram_2.copy_(torch.tensor([first, first + n_bytes]))

    def fetch(self, groups: GpuGroups, blob_bytes: int) -> GpuGroups:
        """The groups with their experts in device memory, as far as there is room. One launch."""
        if groups.most not in self._addr:
            self._addr[groups.most] = torch.zeros_like(groups.addr)
        return fetch(
            groups, -(-blob_bytes // 16) * 16, self._vram_2, self._memory, self._addr[groups.most]
        )
