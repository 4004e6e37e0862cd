"""The host's side of a window on a device, without Python in the loop (csrc/serve.h)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from strata.native import _native
from strata.native.pool import CpuPool, native_layout
from strata.native.records import ShapeLike

Layer = tuple[ShapeLike, npt.NDArray[np.int64]]
"""An expert's layout and the address of each blob, int64 [E]."""


class Server:
    """Answers the rings of windows with the pool's kernels.

    words: address of ring, rows and rows_late, 64 bytes apart; ints, x, rows, late: addresses of
    the payload and of the host's rows (memory.handshake). layers: None for a dense layer. The
    memory, the blobs and the pool must outlive this object.
    """

    def __init__(
        self,
        pool: CpuPool,
        words: int,
        ints: int,
        x: int,
        rows: int,
        late: int,
        d_model: int,
        layers: Sequence[Layer | None],
    ) -> None:
        self._pool = pool
        self._native = _native.Server(words, ints, x, rows, late, d_model)
        for layer in layers:
            if layer is None:
                self._native.add_dense()
            else:
                self._native.add_layer(native_layout(layer[0]), layer[1].tolist())

    def serve(self, n_rows: int, last: int, done: int, limit_us: int) -> int:
        """Answer rings above ``last`` until one of at least ``done``; the last ring's value.

        n_rows: routed rows of the window. Below ``done``: none came for limit_us.
        """
        return self._pool.serve(self._native, n_rows, last, done, limit_us)
