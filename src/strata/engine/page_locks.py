"""Experts in RAM within a GPU's reach: page-locked layer by layer, as far as the driver lets us."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.core.settings import Settings
from strata.experts.store import ExpertStore
from strata.memory.budget import GIB
from strata.memory.mapped import Driver, Locked, address_table, lock_pages


def lock_experts(
    settings: Settings, store: ExpertStore, driver: Driver | None
) -> tuple[list[npt.NDArray[np.int64]] | None, list[Locked], str]:
    """Addresses at which the device reads experts in RAM, int64 [E] a layer (0: it cannot; None: it
    shall not), what was page-locked, and a line that says how much and why not more."""
    if settings.pcie_frac == 0 or settings.experts_on_disk or not store.n_bytes:
        return None, [], ""
    tables: list[npt.NDArray[np.int64]] = []
    done: list[Locked] = []
    why: str | None = None
    for layer in store.layers:
        if layer is None:
            tables.append(np.zeros(0, np.int64))
            continue
        starts = layer.addresses()
        if driver is None:
            tables.append(starts)
            continue
        locked = None
        if why is None:
            # a layer is one piece: the driver copies nothing across the border of two
            locked = lock_pages(driver, int(starts[0]), layer.n_bytes, piece_bytes=layer.n_bytes)
        if locked is None:
            tables.append(np.zeros_like(starts))
            continue
        done.append(locked)
        why = locked.why_not_more
        size = layer.shape.blob_bytes
        table = address_table(driver, locked, int(starts[0]), starts.tolist(), size)
        tables.append(np.array(table, np.int64))
    n_bytes = sum(one.n_bytes for one in done)
    line = f"page-locked for the GPU: {n_bytes / GIB:.2f} of {store.n_bytes / GIB:.2f} GiB"
    return tables, done, line + (f" ({why})" if why else "")
