"""What a machine moves, measured: bytes a second of memory, of the GPU's memory and of the link;
and the GPU's memory in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any

import torch

from strata.engine.layout_cost import read_speed

_GPU_BYTES, _LINK_BYTES = 1 << 30, 256 << 20


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second; 0 where there is no such thing.

    host: main memory read by the CPU's workers. gpu: its own memory. link: from main memory to the
    GPU. both: CPU and link together, while both run.
    """

    host: float
    gpu: float = 0.0
    link: float = 0.0
    both: float = 0.0

    def line(self) -> str:
        """For people."""
        text = f"memory {self.host / 1e9:.1f} GB/s read by the CPU"
        if self.gpu:
            text += (
                f"; GPU memory {self.gpu / 1e9:.0f} GB/s; link {self.link / 1e9:.1f} GB/s; CPU and "
                f"link together {self.both / 1e9:.1f} GB/s"
            )
        return text


def measure_bandwidths(workers: int, device: str) -> Bandwidths:
    """Measure now; takes about a second."""
    host = read_speed(workers)
    if device != "cuda":
        return Bandwidths(host)
    gpu = torch.device("cuda")
    of_gpu, (link, both) = _of_memory(gpu), _of_link(workers, gpu)
    torch.cuda.empty_cache()  # the model is loaded next
    return Bandwidths(host, of_gpu, link, both)


def _of_memory(gpu: torch.device) -> float:
    """Read by the fastest of torch's own kernels: sums, or copies (which read and write)."""
    data = torch.ones(_GPU_BYTES // 4, device=gpu)
    copy = torch.empty_like(data)
    of_sum = _GPU_BYTES / _best(lambda: data.sum(), gpu)
    return max(of_sum, 2 * _GPU_BYTES / _best(lambda: copy.copy_(data), gpu))


def _of_link(workers: int, gpu: torch.device) -> tuple[float, float]:
    """Of the link alone, and of CPU and link together."""
    pinned = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=gpu)
    link = _LINK_BYTES / _best(lambda: target.copy_(pinned, non_blocking=True), gpu)
    return link, _together(workers, pinned, target)


def _best(run: Callable[[], object], gpu: torch.device, n: int = 5, times: int = 4) -> float:
    """Seconds of one of ``times`` runs in a row on the GPU, the fastest of n such rows."""
    run()
    make: Any = torch.cuda.Event
    first, last = (make(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(n):
        torch.cuda.synchronize(gpu)
        first.record()
        for _ in range(times):
            run()
        last.record()
        torch.cuda.synchronize(gpu)
        best = min(best, first.elapsed_time(last) / 1e3 / times)
    return best


def _together(workers: int, pinned: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes a second of CPU and link while both read main memory; one core is left to the link.
    Only what the link moves while the CPU reads is counted."""
    moved, started = [0], [0.0]
    stop = threading.Event()

    def feed() -> None:
        while not stop.is_set():
            target.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize(target.device)
            moved[0] += pinned.numel()

    thread = threading.Thread(target=feed)

    def ready() -> None:
        thread.start()
        started[0] = time.perf_counter()

    try:
        of_cpu = read_speed(max(1, workers - 1), ready=ready, passes=8)
        of_link = moved[0] / (time.perf_counter() - started[0])
    finally:
        stop.set()
        thread.join()
    return of_cpu + of_link


class VramPeak:
    """Most GPU memory in use by anybody on the card while the block runs; 0 without a GPU.

    NVML is asked every 50 ms. Without its package (pynvml): what the driver says is in use at the
    end, and what torch had reserved more before that.
    """

    def __init__(self, device: str) -> None:
        self.n_bytes = 0
        self.source = "no GPU"
        self._gpu = device == "cuda"
        self._stop = threading.Event()
        self._used = _used_memory() if self._gpu else None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> VramPeak:
        """Begin."""
        if self._used is not None:
            self.source = "NVML, whole card"
            self._thread.start()
        elif self._gpu:
            self.source = "driver and torch, whole card; NVML needs the package pynvml"
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._stop.set()
        if self._used is not None:
            self._thread.join()
        elif self._gpu and error is None:
            free, total = torch.cuda.mem_get_info()
            earlier = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
            self.n_bytes = total - free + earlier

    def _watch(self) -> None:
        assert self._used is not None
        while True:
            self.n_bytes = max(self.n_bytes, self._used())
            if self._stop.wait(0.05):
                return


def _used_memory() -> Callable[[], int] | None:
    """Bytes in use on the card, by NVML; None without the package."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    except Exception:  # no package or no driver: the figure is left out, never made up
        return None
    return lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
