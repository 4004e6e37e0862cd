"""Which instruction set the row kernels use: "avx512", "avxvnni" (AVX2 with 256-bit dot products of
bytes: desktop processors without AVX-512), "avx2" or "portable". Knows no threads.

All sets give the same bits; the choice is about speed only.
"""

from __future__ import annotations

from collections.abc import Iterable

from strata.core.errors import SettingError
from strata.native.extension import _native

REQUIRED_FLAGS: dict[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avxvnni": frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
}
"""What the processor must offer for each set, slowest set first."""


def available_isas(flags: Iterable[str] | None = None) -> tuple[str, ...]:
    """Sets that this build has and this processor runs, slowest first.

    flags: pretend that the processor offers only these features (tests).
    """
    found = set(_native.cpu_flags())
    if flags is not None:
        found &= set(flags)
    built = set(_native.built_isas())
    return tuple(isa for isa, need in REQUIRED_FLAGS.items() if isa in built and need <= found)


def pick_isa(isa: str, available: tuple[str, ...]) -> str:
    """The set to use; SettingError when the one asked for is unknown or not available."""
    if isa == "auto":
        return available[-1]
    if isa not in REQUIRED_FLAGS:
        known = ", ".join(("auto", *REQUIRED_FLAGS))
        raise SettingError(f"unknown CPU instruction set {isa!r}; choose one of {known}")
    if isa not in available:
        raise SettingError(
            f"instruction set {isa} cannot run here: this processor and build offer "
            f"{', '.join(available)}; use --cpu-isa auto"
        )
    return isa
