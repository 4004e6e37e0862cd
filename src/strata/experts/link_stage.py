"""Device memory that a window's experts from RAM pass through on their way into a product.

They are copied on a stream of their own: what gate and up need first, the rest while those are
multiplied. Knows no steps and no plan: it is given groups of rows and gives them back with other
addresses.
"""

from __future__ import annotations

import torch

from strata.experts.fast_tier import FastTier
from strata.experts.store import ExpertStore
from strata.experts.stream import STAGE_BYTES
from strata.kernels.expert_rows.launch import GpuGroups
from strata.kernels.expert_rows.shape import ExpertShape
from strata.kernels.expert_rows.triton_fetch import Stage, await_heads, fetch


class LinkStage:
    """The memory, and for each window size the addresses of its groups."""

    def __init__(self, store: ExpertStore, tier: FastTier, device: torch.device) -> None:
        self._tier = tier
        self._sizes = [None if g is None else _sizes(g.shape) for g in store.layers]
        row = max(-(-size[1] // 128) * 128 for size in self._sizes if size is not None)
        slots = min(STAGE_BYTES // row, sum(g.n_experts for g in store.layers if g is not None))
        self._stage = Stage(
            torch.empty((slots, row), dtype=torch.uint8, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._addr: dict[int, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def n_slots(self) -> int:
        """Experts that fit."""
        return len(self._stage.memory)

    def refresh(self) -> None:
        """Between windows, when the tier changed: which addresses are device memory already."""
        first, n_bytes = self._tier.memory
        self._stage.vram_2.copy_(torch.tensor([first, first + n_bytes]))

    def fetch(self, layer: int, groups: GpuGroups) -> GpuGroups:
        """The groups with their experts in device memory, as far as there is room: gate and up are
        there, down behind ``settle``. Two launches."""
        if groups.most not in self._addr:
            self._addr[groups.most] = torch.zeros_like(groups.addr)
        size, addr = self._sizes[layer], self._addr[groups.most]
        assert size is not None, f"layer {layer} has no routed experts"
        if self._stream is None:
            made = fetch(groups, *size, self._stage, addr)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                made = fetch(groups, *size, self._stage, addr)
        await_heads(self._stage)
        return made

    def settle(self) -> None:
        """Whatever is launched from here on finds whole experts."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def _sizes(shape: ExpertShape) -> tuple[int, int]:
    """Bytes that gate and up need from the beginning on, and of the whole."""
    blob = -(-shape.blob_bytes // 16) * 16
    behind = max(shape.gate_bias_offset, shape.up_bias_offset, shape.scale_offset)
    return (blob if behind >= 0 else min(shape.down_offset, blob)), blob
