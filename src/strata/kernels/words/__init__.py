"""words: how a window on the device and the host tell each other that something is ready.

A word is a 32-bit number alone on a 64-byte line of memory that both sides map. The host zeroes all
words while the
stream is idle; afterwards each only grows until the next window.
    ring(word, value)      device -> host: everything written before in stream order is visible,
    then word = value
    wait(word, value)      device: hold the stream until word >= value (the host has raised it), in
    bounded time
RELEASED (the largest signed number) ends every wait; what follows is void and the error word says
so. Atomics on host memory are never used. The references below are the same operations on a NumPy
view, for the host side and for tests.
"""

from strata.kernels.words.ref import (
    RELEASED,
    WORD_BYTES,
    Payload,
    payload_ints,
    raise_word,
    read_payload,
    read_word,
)

__all__ = [
    "RELEASED",
    "WORD_BYTES",
    "Payload",
    "payload_ints",
    "raise_word",
    "read_payload",
    "read_word",
]
