"""Host memory that the GPU can read and write in place: anonymous pages registered with the driver.

Registered piece by piece; a refusal half way leaves the rest unlocked, clears the error so that the
next GPU allocation
works, and is reported with how much is locked and why not more. With no refusal there is no cap.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

PIECE_BYTES = 1 << 30


class Driver(Protocol):
    """The three calls needed; tests give their own."""

    def register(self, address: int, n_bytes: int) -> str | None:
        """Page-lock and map; None, or the driver's reason. Clears the driver's sticky error."""
        ...

    def unregister(self, address: int) -> None:
        """Undo one register."""
        ...

    def device_address(self, address: int) -> int:
        """Where the device sees a registered address."""
        ...


@dataclass(frozen=True)
class Locked:
    """How much of an area is page-locked: a prefix of ``n_bytes``, and why not more (None: all of
    it)."""

    n_bytes: int
    pieces: tuple[int, ...]
    why_not_more: str | None


def lock_pages(
    driver: Driver, address: int, n_bytes: int, piece_bytes: int = PIECE_BYTES
) -> Locked:
    """Register [address, address + n_bytes) in pieces, as far as the driver lets us. 0 bytes is no
    request."""
    done = 0
    pieces: list[int] = []
    while done < n_bytes:
        size = min(piece_bytes, n_bytes - done)
        reason = driver.register(address + done, size)
        if reason is not None:
            return Locked(done, tuple(pieces), reason)
        pieces.append(address + done)
        done += size
    return Locked(done, tuple(pieces), None)


def unlock_pages(driver: Driver, locked: Locked) -> None:
    """Unregister every piece."""
    for piece in locked.pieces:
        driver.unregister(piece)


def address_table(
    driver: Driver, locked: Locked, base: int, starts: list[int], n_bytes: int
) -> list[int]:
    """Device address of each [start, start + n_bytes) that is locked as a whole, else 0.

    One piece that is not locked, read by a kernel, would kill the GPU context; so an object that
    crosses the end of
    what is locked has no address.
    """
    end = base + locked.n_bytes
    return [driver.device_address(s) if s + n_bytes <= end else 0 for s in starts]


class CudaDriver:
    """The CUDA runtime through ``cuda-bindings``."""

    def __init__(self, runtime: object) -> None:
        self._rt = runtime

    def register(self, address: int, n_bytes: int) -> str | None:
        """cudaHostRegister, mapped and portable."""
        rt = self._rt
        flags = rt.cudaHostRegisterMapped | rt.cudaHostRegisterPortable  # type: ignore[attr-defined]
        (error,) = rt.cudaHostRegister(address, n_bytes, flags)  # type: ignore[attr-defined]
        if int(error) == 0:
            return None
        rt.cudaGetLastError()  # type: ignore[attr-defined]  # clear it for the next call
        return f"cudaHostRegister of {n_bytes} bytes: {error.name}"

    def unregister(self, address: int) -> None:
        """cudaHostUnregister."""
        self._rt.cudaHostUnregister(address)  # type: ignore[attr-defined]

    def device_address(self, address: int) -> int:
        """cudaHostGetDevicePointer."""
        error, pointer = self._rt.cudaHostGetDevicePointer(address, 0)  # type: ignore[attr-defined]
        assert int(error) == 0, f"{address:#x} is not registered: {error}"
        return int(pointer)


class MappedArea:
    """Anonymous memory, zeroed, registered as a whole; ``host`` is a uint8 tensor over it."""

    def __init__(
        self, driver: Driver, n_bytes: int, on_refusal: Callable[[str], Exception]
    ) -> None:
        self._driver = driver
        size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, size)
        self.host = torch.frombuffer(self._map, dtype=torch.uint8)
        self._locked = lock_pages(driver, self.host.data_ptr(), size)
        if self._locked.why_not_more is not None:
            unlock_pages(driver, self._locked)
            raise on_refusal(self._locked.why_not_more)

    def device_address(self, offset: int) -> int:
        """Where the device sees byte ``offset``."""
        return self._driver.device_address(self.host.data_ptr() + offset)

    def close(self) -> None:
        """Unregister; the memory goes with the last tensor over it."""
        unlock_pages(self._driver, self._locked)
