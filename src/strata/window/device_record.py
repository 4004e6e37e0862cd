"""Carrying a program out on a device: eagerly, or recorded once as a CUDA graph and replayed.

A recorder is a function (launches) -> callable; ``eager`` of ``window/record.py`` is one too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launch = Callable[[], None]


def graph(launch: Launch) -> Launch:
    """What ``launch`` launches, as one graph. It has run once before, so that every kernel is
    compiled and loaded; nothing in it may synchronise or read the device."""
    recorded = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(recorded, stream=stream, capture_error_mode="thread_local"):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    return recorded.replay


def stream_trouble() -> str | None:
    """Why the current stream will not go on, or None while it runs."""
    try:
        done = torch.cuda.current_stream().query()
    except RuntimeError as error:
        return f"the device reports: {error}"
    return "the window ended without its last ring" if done else None
