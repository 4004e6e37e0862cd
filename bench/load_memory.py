"""How much memory loading experts takes beyond the experts themselves, at a size that matters.

Writes a file of about --gib of random Q4_K rows, loads them as experts of 768 x 2048 on --workers
threads, into tiles and as file rows, and samples this process's memory meanwhile. Prints anonymous
memory at its highest minus the store, beside the bound that ``strata plan`` counts with
(``loader.peak_bytes``); pages of the file (the page cache) apart; and how much of the store lies in
huge pages. Needs that much disk and twice that much memory:

    PYTHONPATH=src:. python bench/load_memory.py [--gib 1] [--workers 2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.experts.loader import load_experts, peak_bytes
from strata.experts.store import ExpertLayer, ExpertStore
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import ExpertShape, layout
from strata.memory.pages import huge_share
from strata.models.expert_source import PROJS, Proj

D_MODEL, D_EXPERT, N_EXPERTS, TYPE = 2048, 768, 32, "Q4_K"


def memory_kib() -> dict[str, int]:
    """RssAnon and RssFile of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) for name in ("RssAnon", "RssFile")}


class Sampler:
    """Highest memory while a call runs."""

    def __init__(self) -> None:
        self.highest = {"RssAnon": 0, "RssFile": 0}
        self._stop = threading.Event()

    def watch(self, call: Callable[[], ExpertStore]) -> ExpertStore:
        """call(), watched every 2 ms."""
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            return call()
        finally:
            self._stop.set()
            thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            for name, kib in memory_kib().items():
                self.highest[name] = max(self.highest[name], kib)


class FileExperts:
    """Experts in one file: rows of gate, up and down one after the other."""

    def __init__(self, path: Path, n_layers: int) -> None:
        raw = np.memmap(path, np.uint8, "r")
        self._experts = raw.reshape(n_layers * N_EXPERTS, -1)
        self.layers = tuple(range(n_layers))
        self.n_experts = N_EXPERTS

    def types(self, layer: int) -> tuple[str, str, str]:
        """All alike."""
        return TYPE, TYPE, TYPE

    def rows(self, layer: int, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """A view of the file."""
        piece = len(self._experts[0]) // 3
        i = PROJS.index(proj)
        row_bytes = TYPES[TYPE].row_bytes(D_EXPERT if proj == "down" else D_MODEL)
        memory = self._experts[N_EXPERTS * layer + expert, piece * i : piece * (i + 1)]
        return memory.reshape(-1, row_bytes)

    def bias(self, layer: int, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """None."""
        return None

    def scale(self, layer: int, expert: int, proj: Proj) -> float:
        """One."""
        return 1.0

    def tensor_names(self) -> tuple[str, ...]:
        """None of interest."""
        return ()

    def check(self) -> None:
        """Written just now."""


def write(path: Path, shape: ExpertShape, n_layers: int) -> None:
    """Random rows; their scales do not matter here."""
    rng = np.random.default_rng(0)
    piece = rng.integers(0, 256, shape.matrix_bytes[0] * 3, np.uint8).tobytes()
    with path.open("wb") as file:
        for _ in range(n_layers * N_EXPERTS):
            file.write(piece)


def main() -> None:
    """Measure both layouts and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the file is written [temporary]")
    options = parser.parse_args()
    shape = layout(D_MODEL, D_EXPERT, (TYPE, TYPE, TYPE))
    n_layers = max(1, round(options.gib * 2**30 / (shape.blob_bytes * N_EXPERTS)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "experts.bin"
        write(path, shape, n_layers)
        for kind in ("tiles", "native"):
            shapes = [(layout(D_MODEL, D_EXPERT, (TYPE,) * 3, layouts=(kind,) * 3), N_EXPERTS)]
            measure(kind, shapes * n_layers, FileExperts(path, n_layers), options.workers)


def measure(
    kind: str, shapes: list[tuple[ExpertShape, int]], source: FileExperts, workers: int
) -> None:
    """Load once, watched."""
    before, sampler, start = memory_kib(), Sampler(), time.perf_counter()
    store = sampler.watch(lambda: load_experts(shapes, source, workers=workers))
    seconds = time.perf_counter() - start
    extra = 1024 * (sampler.highest["RssAnon"] - before["RssAnon"]) - store.n_bytes
    bound = peak_bytes(shapes, workers)
    share = huge_share([layer.blobs for layer in store.layers if isinstance(layer, ExpertLayer)])
    huge = "unknown" if share is None else f"{100 * share:.0f} %"
    print(
        f"{kind:6}  store {store.n_bytes / 2**20:7.0f} MiB in {seconds:4.1f} s, "
        f"beyond it {extra / 2**20:5.1f} MiB (bound {bound / 2**20:.1f}), "
        f"file pages at most {(sampler.highest['RssFile'] - before['RssFile']) / 2**10:.0f} MiB, "
        f"huge pages {huge}"
    )


if __name__ == "__main__":
    main()
