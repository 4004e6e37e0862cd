"""Loads the C++ extension and hands it the grids of the IQ types; all of native imports it here."""

from __future__ import annotations

from strata.formats.quants_grids import grid

try:
    from strata.native import _native
except ImportError as error:
    raise ImportError(
        f"the native kernels are not built for this Python ({error}); "
        f"install the package (pip install .) or run scripts/build_native.sh"
    ) from error

__all__ = ["_native"]


def _set_grids() -> None:
    """Give every grid to the extension, which keeps its own copy."""
    for name in ("IQ1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        points = grid(name)
        stored = _native.set_grid(name, points.ctypes.data, points.nbytes)
        assert stored, f"grid {name} has {points.nbytes} bytes, which the extension does not expect"


_set_grids()
