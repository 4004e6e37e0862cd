"""Which pieces of the experts are page-locked for a GPU (C13).

Expectation: the driver's rule that one copy may not cross from one registered range into another
(cudaMemcpy gives cudaErrorInvalidValue), here as a driver that keeps the ranges it was given.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from strata.core.settings import Settings
from strata.engine.page_locks import lock_experts


class Ranges:
    """A driver with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[tuple[int, int]] = []

    def register(self, address: int, n_bytes: int) -> str | None:
        if n_bytes > self.room:
            return "out of room"
        self.room -= n_bytes
        self.held.append((address, address + n_bytes))
        return None

    def unregister(self, address: int) -> None:
        raise AssertionError("nothing is unlocked while loading")

    def device_address(self, address: int) -> int:
        return address


def store(n_layers: int, n_experts: int, stride: int) -> SimpleNamespace:
    """Layers of experts as large as a real one's (numbers only, no memory)."""
    layers = []
    for layer in range(n_layers):
        base = (layer + 1) << 40
        starts = base + np.arange(n_experts, dtype=np.int64) * stride
        layers.append(
            SimpleNamespace(
                addresses=lambda starts=starts: starts,
                n_bytes=n_experts * stride,
                shape=SimpleNamespace(blob_bytes=stride - 7),
            )
        )
    return SimpleNamespace(layers=layers, n_bytes=n_layers * n_experts * stride)


def test_no_expert_crosses_a_border() -> None:
    experts = store(n_layers=3, n_experts=512, stride=2_621_440 + 128)  # 1.25 GiB a layer
    driver = Ranges(room=1 << 60)
    tables, locked, line = lock_experts(Settings(), experts, driver)  # type: ignore[arg-type]
    assert len(locked) == 3 and "(" not in line
    for layer, table in zip(experts.layers, tables, strict=True):
        assert np.array_equal(table, layer.addresses())
        for start in table:
            inside = [a <= start and start + layer.shape.blob_bytes <= b for a, b in driver.held]
            assert sum(inside) == 1


def test_a_refused_layer_has_no_addresses_and_the_line_says_why() -> None:
    experts = store(n_layers=3, n_experts=4, stride=1000)
    tables, _, line = lock_experts(Settings(), experts, Ranges(room=9000))  # type: ignore[arg-type]
    assert [bool(t.all()) for t in tables] == [True, True, False]
    assert not tables[2].any() and line.endswith("(out of room)")
