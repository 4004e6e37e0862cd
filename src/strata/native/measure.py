"""Times of the pool itself: handing over an empty job, and reading memory. Knows no weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import EngineError, SettingError
from strata.native.extension import _native


@dataclass(frozen=True)
class HandoverTimes:
    """Microseconds from giving away an empty job until its last worker is done, one per job."""

    native_us: npt.NDArray[np.float64]
    """Measured by a loop in C++."""
    python_us: npt.NDArray[np.float64]
    """The same job by a call from Python: as native, and the call itself."""


def handover_times(pool: _native.Pool, n: int, pause_us: int) -> HandoverTimes:
    """n jobs each way, turn by turn; see ``CpuPool.measure_handover``."""
    if n < 1 or pause_us < 0:
        raise SettingError(f"{n} jobs, {pause_us} us between them; at least 1 and 0 are needed")
    native, python = [], []
    for done in range(0, n, 10):
        times = min(10, n - done)
        native += pool.handovers(times, pause_us)
        for _ in range(times):
            if pause_us:
                time.sleep(pause_us * 1e-6)
            start = time.perf_counter_ns()
            pool.handovers(1, 0)
            python.append(time.perf_counter_ns() - start)
    return HandoverTimes(np.array(native) / 1e3, np.array(python) / 1e3)


def read_seconds(pool: _native.Pool, memory: torch.Tensor, times: int) -> list[float]:
    """Seconds of each pass; see ``CpuPool.measure_read``. EngineError for what is not plain RAM."""
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise EngineError(f"measure_read: memory on {memory.device}, expected contiguous on cpu")
    n_bytes = memory.numel() * memory.element_size()
    return [pool.read(memory.data_ptr(), n_bytes)[0] * 1e-9 for _ in range(times)]
