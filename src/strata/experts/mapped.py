"""Experts that stay in the checkpoint's files: the page cache is their RAM.

Only biases and scales are copied. For layouts whose matrices are views of the mapped files; a
matrix that is re-coded while loading cannot stay there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import UnsupportedError
from strata.experts.loader import fill_blob, fill_extras
from strata.experts.store import ExpertStore, Layer
from strata.formats.paging import page_in_memory, read_only_what_is_asked, will_need_at
from strata.kernels.expert_rows import ExpertShape
from strata.models.expert_source import PROJS, ExpertSource, Proj

RECENT = 64
"""Where the system does not tell what is in memory, an expert asked for within its layer's last
that many calls is taken to be there still."""


class ReadAhead:
    """Has matrices read in the background, but for those that are in memory.

    Asking for what is there costs the system a look at every page (0.6 ms for 10 experts of 2 MB),
    so one page of each is looked at first. That look is believed once it has found a page missing:
    of a file that is not ours to write the system says that all of it is in memory. From then on
    the system reads nothing around what is asked for: that would drive experts out of memory.
    """

    def __init__(self) -> None:
        self.told_truth = False
        self._areas: list[tuple[int, int]] = []

    def add_area(self, address: int, n_bytes: int) -> None:
        """Memory in which matrices lie that will be asked for."""
        self._areas.append((address, n_bytes))

    def __call__(self, matrices: Iterable[tuple[int, int]]) -> None:
        """Ask for these (address, bytes), in the order given."""
        for address, n_bytes in matrices:
            # files are read front to back: the last page stands for all
            there = page_in_memory(address + n_bytes - 1)
            if there is False and not self.told_truth:
                self.told_truth = True
                for area in self._areas:
                    read_only_what_is_asked(*area)
            if not there or not self.told_truth:
                will_need_at(address, n_bytes)


class MappedLayer:
    """Experts of one layer as views of the files. Keeps the views, and so the mapping, alive.

    UnsupportedError when a matrix is no view.
    """

    def __init__(
        self,
        shape: ExpertShape,
        n_experts: int,
        source: ExpertSource,
        layer: int,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.shape, self.n_experts = shape, n_experts
        self._read_ahead = read_ahead or ReadAhead()
        self._source, self._layer = source, layer
        self._rows = [[self._view(e, p) for p in PROJS] for e in range(n_experts)]
        self._places = [[(m.ctypes.data, m.nbytes) for m in rows] for rows in self._rows]
        for i in range(len(PROJS)):
            first = min(matrices[i][0] for matrices in self._places)
            end = max(sum(matrices[i]) for matrices in self._places)
            self._read_ahead.add_area(first, end - first)
        self._extras_start = _extras_start(shape)
        size = shape.blob_bytes - self._extras_start
        self._extras = np.zeros((n_experts, size), np.uint8)
        for expert in range(n_experts):
            extras = self._extras[expert]
            fill_extras(extras, self._extras_start, shape, source, layer, expert)
        self._calls = 0
        self._asked_E = np.full(n_experts, -RECENT, np.int64)

    def _view(self, expert: int, proj: Proj) -> npt.NDArray[np.uint8]:
        rows = self._source.rows(self._layer, expert, proj)
        # views of a mapped file cannot be written, copies can
        if rows.flags.writeable or not rows.flags.c_contiguous:
            raise UnsupportedError(
                f"--experts-on-disk: layer {self._layer}'s {proj} matrices are re-coded while "
                f"loading, so they cannot be used where they lie; leave the setting out, or "
                f"convert the checkpoint to GGUF"
            )
        return rows

    @property
    def n_bytes(self) -> int:
        """RAM taken: biases and scales."""
        return self._extras.nbytes

    @property
    def n_mapped_bytes(self) -> int:
        """Bytes of the matrices."""
        return sum(rows.nbytes for matrices in self._rows for rows in matrices)

    def addresses(self) -> npt.NDArray[np.int64]:
        """Bases of gate, up, down and the rest, int64 [E, 4]: add the shape's offsets."""
        shape = self.shape
        starts = (shape.gate_offset, shape.up_offset, shape.down_offset)
        bases = np.empty((self.n_experts, 4), np.int64)
        for expert, matrices in enumerate(self._rows):
            for i, (rows, start) in enumerate(zip(matrices, starts, strict=True)):
                bases[expert, i] = rows.ctypes.data - start
            bases[expert, 3] = self._extras[expert].ctypes.data - self._extras_start
        return bases

    def blob(self, expert: int) -> torch.Tensor:
        """One expert's bytes put together, uint8 [blob_bytes]: a copy."""
        blob = np.zeros(self.shape.blob_bytes, np.uint8)
        fill_blob(blob, self.shape, self._source, self._layer, expert)
        return torch.from_numpy(blob)

    def will_need(self, expert_G: npt.NDArray[np.int32]) -> None:
        """Have the system read these experts ahead, those that are not in memory.

        In the order in which the pool will read them: all gates, all ups, all downs. Where the
        system does not tell what is in memory, an expert asked for a short while ago is left out.
        """
        self._calls += 1
        wanted = expert_G.tolist()
        if not self._read_ahead.told_truth:
            wanted = expert_G[self._calls - self._asked_E[expert_G] > RECENT].tolist()
        self._read_ahead(self._places[expert][i] for i in range(len(PROJS)) for expert in wanted)
        self._asked_E[expert_G] = self._calls


def map_experts(
    shapes: Sequence[tuple[ExpertShape, int] | None], source: ExpertSource
) -> ExpertStore:
    """All experts as they lie in the checkpoint's files. UnsupportedError where they cannot."""
    read_ahead = ReadAhead()
    layers: list[Layer | None] = [
        None if entry is None else MappedLayer(*entry, source, index, read_ahead)
        for index, entry in enumerate(shapes)
    ]
    return ExpertStore(layers)


def mapped_bytes(shapes: Sequence[tuple[ExpertShape, int] | None]) -> tuple[int, int]:
    """(bytes that stay in the files, bytes of RAM for biases and scales)."""
    entries = [entry for entry in shapes if entry is not None]
    on_disk = sum(sum(shape.matrix_bytes) * n for shape, n in entries)
    return on_disk, sum((shape.blob_bytes - _extras_start(shape)) * n for shape, n in entries)


def _extras_start(shape: ExpertShape) -> int:
    """Where the blob's biases and scales begin; they come last."""
    offsets = [shape.gate_bias_offset, shape.scale_offset]
    return min([o for o in offsets if o >= 0], default=shape.blob_bytes)
