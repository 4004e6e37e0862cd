"""The fast tier: slots that hold copies of the hottest experts (VRAM; an ordinary buffer without a
GPU).

Knows which expert sits where, and nothing about who computes it. An expert leaves the address table
before its slot
is rewritten, and enters it after; both happen between windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import InputError, SettingError
from strata.experts.store import ExpertStore, anonymous, stride_of

Pair = tuple[int, int]
"""(layer, expert)"""


class FastTier:
    """n_slots slots, each as large as the largest blob, in RAM or on a device. ``address_LE[l][e]``
    is 0 where the expert is not resident."""

    def __init__(
        self, store: ExpertStore, n_slots: int, device: torch.device | None = None
    ) -> None:
        groups = [layer for layer in store.layers if layer is not None]
        self._store = store
        self._device = device
        self._slot_bytes = max((stride_of(g.shape) for g in groups), default=0)
        self._slots = self._memory(n_slots)
        self.version = 0
        """Grows with every change of ``address_LE``."""
        self._slot_of: dict[Pair, int] = {}
        self._free = list(range(n_slots - 1, -1, -1))
        self.address_LE: list[npt.NDArray[np.int64]] = [
            np.zeros(layer.n_experts if layer is not None else 0, dtype=np.int64)
            for layer in store.layers
        ]

    @property
    def store(self) -> ExpertStore:
        """All experts, where they are copied from."""
        return self._store

    @property
    def n_slots(self) -> int:
        """Experts that fit."""
        return int(self._slots.shape[0])

    @property
    def n_bytes(self) -> int:
        """Memory of all slots."""
        return self.n_slots * self._slot_bytes

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the slots."""
        return self._slots.data_ptr(), self.n_bytes

    def resident(self) -> list[Pair]:
        """Pairs in the tier."""
        return sorted(self._slot_of)

    def insert(self, pair: Pair) -> None:
        """Copy an expert in; a free slot must exist (SettingError)."""
        if pair in self._slot_of:
            return
        if not self._free:
            raise SettingError(f"the fast tier's {self.n_slots} slots are all taken")
        slot = self._free.pop()
        blob = self._store.blob(*pair)
        self._slots[slot, : blob.numel()].copy_(blob)
        self._slot_of[pair] = slot
        self.address_LE[pair[0]][pair[1]] = self._slots[slot].data_ptr()
        self.version += 1

    def evict(self, pair: Pair) -> None:
        """Forget an expert; its slot becomes free."""
        slot = self._slot_of.pop(pair)
        self.address_LE[pair[0]][pair[1]] = 0
        self.version += 1
        self._free.append(slot)

    def impose(self, pairs: Iterable[Pair]) -> None:
        """Make exactly these pairs resident."""
        wanted = set(pairs)
        for pair in [p for p in self._slot_of if p not in wanted]:
            self.evict(pair)
        for pair in sorted(wanted):
            self.insert(pair)

    def resize(self, n_slots: int) -> None:
        """Between windows: so many slots, all of them empty; the old memory is let go first."""
        for addresses in self.address_LE:
            addresses[:] = 0
        self.version += 1
        self._slot_of.clear()
        self._slots = torch.empty((0, self._slot_bytes or 1), dtype=torch.uint8)
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._slots = self._memory(n_slots)
        self._free = list(range(n_slots - 1, -1, -1))

    def _memory(self, n_slots: int) -> torch.Tensor:
        size = n_slots * self._slot_bytes
        if self._device is None:
            memory = anonymous(size)
        else:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return memory.view(n_slots, self._slot_bytes or 1)

    def slot_tensor(self, pair: Pair) -> torch.Tensor:
        """The resident copy, uint8."""
        return self._slots[self._slot_of[pair]]


def read_profile(path: str | Path, n_experts_L: Sequence[int]) -> list[Pair]:
    """Ranked (layer, expert) pairs, one "layer expert" a line; '#' starts a comment.

    n_experts_L: routed experts of each layer. A pair that is no routed expert of the model, a
    repeated pair or a
    malformed line is an InputError with its line number.
    """
    pairs: list[Pair] = []
    seen: set[Pair] = set()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"expert profile {path}: cannot be read ({error})") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or not all(w.isascii() and w.isdigit() for w in words):
            raise InputError(f'{path}, line {number}: expected "layer expert", found {line!r}')
        layer, expert = int(words[0]), int(words[1])
        if layer >= len(n_experts_L) or expert >= n_experts_L[layer]:
            have = n_experts_L[layer] if layer < len(n_experts_L) else 0
            raise InputError(
                f"{path}, line {number}: layer {layer}, expert {expert} is no routed expert of "
                f"this model "
                f"({len(n_experts_L)} layers; that layer has {have} experts)"
            )
        if (layer, expert) in seen:
            raise InputError(
                f"{path}, line {number}: layer {layer}, expert {expert} is listed twice"
            )
        seen.add((layer, expert))
        pairs.append((layer, expert))
    return pairs


def even_profile(n_experts_L: Sequence[int]) -> list[Pair]:
    """Without a profile: expert 0 of every layer, then expert 1, and so on."""
    widest = max(n_experts_L, default=0)
    return [(layer, e) for e in range(widest) for layer, n in enumerate(n_experts_L) if e < n]
