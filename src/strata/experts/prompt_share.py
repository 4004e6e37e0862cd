"""When the layers of a prompt pass which point."""

from __future__ import annotations

import torch

MARKS = ("begun", "routed", "computed", "joined")
"""Moments of a layer on the device's main stream: before its mixer, when its routing is known, when
its own rows are there, when the CPU's are."""


class LayerClock:
    """When a chunk's layers passed their marks, by the device's own clock."""

    def __init__(self, n_layers: int, compiled: bool) -> None:
        self._events: dict[tuple[int, str], torch.cuda.Event] = {}
        for layer in range(n_layers if compiled else 0):
            for mark in MARKS:
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._events[layer, mark] = event

    def mark(self, layer: int, mark: str) -> None:
        """Here in stream order."""
        event = self._events.get((layer, mark))
        if event is not None:
            event.record(torch.cuda.current_stream())

    def seconds(self, layer: int, first: str, last: str) -> float:
        """From one mark of a layer to another, when both have passed."""
        ms: float = self._events[layer, first].elapsed_time(self._events[layer, last])
        return 1e-3 * ms
