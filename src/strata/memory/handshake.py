"""How a window on a device and its host meet: words, the payload of a ring, and the host's rows.

One piece of memory that both sides map. The device rings with layer + 1 after it has written a
payload; the host answers by writing rows and raising ``rows`` (and later ``rows_late``) to
layer + 1. The host may write rows of a layer only after that layer's ring; every earlier join
precedes the ring in stream order, so one buffer of each kind suffices.

Where nothing is a device (kernels run by Triton's interpreter) the same memory is plain RAM, the
host answers inside the ring itself, and no wait is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import StallError
from strata.kernels.words import (
    RELEASED,
    WORD_BYTES,
    Payload,
    payload_ints,
    raise_word,
    read_payload,
    read_word,
)

RING, ROWS, ROWS_LATE, ERROR = range(4)
HOST_LIMIT_S = 20.0
DEVICE_LIMIT_NS = 20 * 10**9
_ALIGN = 4096
_CHECK_EVERY = 4096
"""Polls between two looks at the clock and the stream."""


class Area(Protocol):
    """Memory of both sides: ``memory.mapped.MappedArea``, or ``PlainArea``."""

    host: torch.Tensor

    def device_address(self, offset: int) -> int:
        """Where the device sees byte ``offset``."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class PlainArea:
    """Ordinary zeroed memory, seen by both sides at the same address."""

    def __init__(self, n_bytes: int) -> None:
        self.host = torch.zeros(n_bytes + _ALIGN, dtype=torch.uint8)
        self._shift = -self.host.data_ptr() % _ALIGN
        self.host = self.host[self._shift : self._shift + n_bytes]

    def device_address(self, offset: int) -> int:
        """The address of byte ``offset``."""
        return self.host.data_ptr() + offset

    def close(self) -> None:
        """Nothing to do."""


def area_bytes(d_model: int, n_tokens: int, n_rows: int) -> int:
    """Bytes of an area for windows of up to n_tokens tokens and n_rows routed rows."""
    return _offsets(d_model, n_tokens, n_rows)[-1]


def _offsets(d_model: int, n_tokens: int, n_rows: int) -> tuple[int, ...]:
    sizes = (
        _ALIGN,
        4 * payload_ints(n_rows),
        4 * n_tokens * d_model,
        4 * n_rows * d_model,
        4 * n_rows * d_model,
    )
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // _ALIGN) * _ALIGN)
    return tuple(found)


class Handshake:
    """The shared memory of one engine."""

    def __init__(self, area: Area, d_model: int, n_tokens: int, n_rows: int) -> None:
        self._area = area
        self.n_rows = n_rows
        at = _offsets(d_model, n_tokens, n_rows)
        numbers = area.host.numpy()
        self.words: npt.NDArray[np.uint32] = numbers[: at[1]].view(np.uint32)
        self._ints: npt.NDArray[np.int32] = numbers[at[1] : at[2]].view(np.int32)
        self._x = _floats(area, at[2], n_tokens * d_model)
        self._rows = _floats(area, at[3], n_rows * d_model).view(n_rows, d_model)
        self._late = _floats(area, at[4], n_rows * d_model).view(n_rows, d_model)
        self._d_model = d_model
        self._shift = area.host.data_ptr() - area.device_address(0)
        self.ints_address = area.device_address(at[1])
        self.x_address = area.device_address(at[2])
        self.rows_address = area.device_address(at[3])
        self.late_address = area.device_address(at[4])

    def word_address(self, word: int) -> int:
        """Where the device sees a word."""
        return self._area.device_address(word * WORD_BYTES)

    def host_address(self, device_address: int) -> int:
        """The host's address of what the device sees at another."""
        return device_address + self._shift

    def x(self, n_tokens: int) -> torch.Tensor:
        """The payload's activations, f32 [T, D], as the host sees them."""
        return self._x[: n_tokens * self._d_model].view(n_tokens, self._d_model)

    def payload(self, n_rows: int) -> Payload:
        """The payload's rows, of a window of n_rows routed rows."""
        return read_payload(self._ints, n_rows)

    def out(self, late: bool) -> torch.Tensor:
        """Where the host writes its rows, f32 [R, D]."""
        return self._late if late else self._rows

    def start(self) -> None:
        """Before a launch, while the stream is idle: all words are zero."""
        self.words[:] = 0

    def answer(self, layer: int, late: bool) -> None:
        """The rows of that layer are written."""
        raise_word(self.words, ROWS_LATE if late else ROWS, layer + 1)

    def release(self) -> None:
        """End every wait; the window that runs is void."""
        for word in (ROWS, ROWS_LATE):
            raise_word(self.words, word, RELEASED)

    def next_ring(self, last: int, failed: Callable[[], str | None]) -> int:
        """The ring's value once it is above ``last``.

        StallError when the device does not ring within HOST_LIMIT_S, or ``failed`` (asked now and
        then) gives a reason why it never will.
        """
        words, started = self.words, time.monotonic()
        while True:
            for _ in range(_CHECK_EVERY):
                value = int(words[0])
                if value > last:
                    return value
            self.require_life(last, failed, time.monotonic() - started)

    def require_life(self, last: int, failed: Callable[[], str | None], quiet_s: float) -> None:
        """StallError, and every wait released, when the device will not ring after ``last``."""
        reason = failed()
        if read_word(self.words, RING) > last:
            return
        if reason is None and quiet_s > HOST_LIMIT_S:
            reason = f"no answer within {HOST_LIMIT_S:g} s"
        if reason is not None:
            self.release()
            where = f"after the ring of layer {last - 1}" if last else "before its first ring"
            raise StallError(
                f"the GPU stopped {where}: {reason}; the window is void, start the sequence anew"
            )

    def require_no_timeout(self) -> None:
        """StallError when a wait on the device ran into its own limit."""
        layer = read_word(self.words, ERROR) - 1
        if layer >= 0:
            raise StallError(
                f"the GPU waited {DEVICE_LIMIT_NS / 1e9:g} s for the CPU's rows of layer {layer}; "
                f"the window is void, start the sequence anew"
            )

    def close(self) -> None:
        """Let the memory go."""
        self._area.close()


def _floats(area: Area, offset: int, n: int) -> torch.Tensor:
    return area.host[offset : offset + 4 * n].view(torch.float32)
