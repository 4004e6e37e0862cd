"""ggml's dot products (package ``libggml-python``), row by row and token by token as engines built
on it compute missed experts: what our kernels are measured against.

The loop over rows is C, compiled when asked for, so that Python costs it nothing.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.errors import SettingError
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight

_LOOP = Path(__file__).with_name("ggml_rows.c")
_FLAGS = ("-O2", "-shared", "-fPIC", "-pthread")


class _Traits(ctypes.Structure):
    """ggml_type_traits_cpu."""

    _fields_ = (
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


class Ggml:
    """SettingError when the package or a C compiler is missing."""

    def __init__(self) -> None:
        self._lib = _library()
        self._rows_seconds = _compiled(_compiler())
        self._lib.ggml_cpu_init()
        self._traits = self._lib.ggml_get_type_traits_cpu
        self._traits.restype = ctypes.POINTER(_Traits)
        self.name = f"libggml-python {_version()}, {self._build()} build"

    def rows(
        self, name: str, x_TK: npt.NDArray[np.float32], n_rows: int, cpus: Sequence[int]
    ) -> Callable[[Weight], float] | None:
        """A function: matrix -> seconds of all its rows times all tokens, one thread a CPU.

        Activations are quantized here, once. None for types that ggml has no dot product for.
        """
        number = TYPES[name].ggml_id
        if number is None:
            return None
        traits = self._traits(number).contents
        if not traits.vec_dot:
            return None
        n_tokens, n_cols = x_TK.shape
        x_bytes = 4 * n_cols + 64
        x = np.zeros((n_tokens, x_bytes), np.uint8)
        other = self._traits(traits.vec_dot_type).contents
        for t in range(n_tokens):
            _quantize(other, traits.vec_dot_type, np.ascontiguousarray(x_TK[t]), x[t])
        out = np.zeros((n_tokens, n_rows), np.float32)
        where = (ctypes.c_int * len(cpus))(*cpus)

        def run(w: Weight) -> float:
            assert w.n_rows == n_rows and w.n_cols == n_cols and w.layout == "native"
            return float(
                self._rows_seconds(
                    traits.vec_dot, n_cols, w.data.data_ptr(), w.data.shape[1], n_rows,
                    x.ctypes.data, x_bytes, n_tokens, out.ctypes.data, len(cpus), where,
                )
            )  # fmt: skip

        run.out = out  # type: ignore[attr-defined]  # kept alive with the function; for tests
        return run

    def _build(self) -> str:
        """The instruction set that the library was compiled for."""
        for flag in ("avx512_vnni", "avx512", "avx2", "neon"):
            has = getattr(self._lib, f"ggml_cpu_has_{flag}", None)
            if has is not None and has():
                return flag.upper().replace("_", " ")
        return "plain"


def _quantize(
    traits: Any, kind: int, x_K: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]
) -> None:
    if kind == 0:  # F32 against F32: as they are
        out[: x_K.nbytes] = x_K.view(np.uint8)
    else:
        traits.from_float(x_K.ctypes.data, out.ctypes.data, len(x_K))


def _library() -> ctypes.CDLL:
    spec = find_spec("libggml")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    names = ("libggml-cpu.so", "libggml-cpu.dylib", "ggml-cpu.dll")
    found = [p for folder in folders for name in names for p in sorted(folder.rglob(name))]
    if not found:
        raise SettingError(
            "--against ggml needs the package libggml-python (pip install libggml-python), which "
            "is not installed here; leave --against out to measure our kernels alone"
        )
    return ctypes.CDLL(str(found[0]))


def _version() -> str:
    try:
        return version("libggml-python")
    except PackageNotFoundError:
        return "of unknown version"


def _compiler() -> str:
    """A C compiler's name; SettingError when there is none."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise SettingError(
            "--against ggml compiles a loop of 30 lines and found no C compiler (cc, gcc, clang); "
            "install one, or leave --against out"
        )
    return compiler


@cache
def _compiled(compiler: str) -> Any:
    """The C loop; SettingError when the compiler fails."""
    # the file may go once it is loaded
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ggml_rows.so"
        command = [compiler, *_FLAGS, "-o", str(target), str(_LOOP)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            line = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise SettingError(f"--against ggml: {compiler} cannot compile {_LOOP.name}: {line}")
        function = ctypes.CDLL(str(target)).rows_seconds
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.restype = ctypes.c_double
    function.argtypes = [
        pointer, number, pointer, size, ctypes.c_long, pointer, size, number, pointer, number,
        pointer,
    ]  # fmt: skip
    return function
