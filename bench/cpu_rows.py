"""How fast the CPU reads memory, and how fast it computes rows of weights from it.

Prints read bandwidth for 1 to all threads, then for each weight type, layout, instruction set and
number of activation rows the GB/s of weight bytes (in that layout) and 1e9 weights a second times
rows, beside ggml's vec_dot. Variants of a type take turns; numbers are medians. Needs
libggml-python, a C compiler, the native extension and, for its weights, the tests' kit:

    PYTHONPATH=src:. python bench/cpu_rows.py [--types Q4_K,IQ3_S] [--repeats 5] [--json out.json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests import ggml_ref
from tests.kernels.test_linear import make_weight

from strata.formats.tiles import tile_plan
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight
from strata.native import CpuPool, available_isas
from strata.native.recode import encode_into

N_COLS = 2560
ROWS = (1, 2, 4, 8)

C_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
typedef void (*Dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
void dots(Dot dot, int n, const char *w, size_t row_bytes, long n_rows, const char *x,
          size_t x_bytes, int n_tokens, float *out) {
    for (long r = 0; r < n_rows; r++)
        for (int t = 0; t < n_tokens; t++)
            dot(n, out + t, 0, w + row_bytes * r, 0, x + x_bytes * t, 0, 1);
}
uint64_t read_all(const uint64_t *p, size_t n) {
    uint64_t sum[16] = {0};
    for (size_t i = 0; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) sum[j] += p[i + j];
    uint64_t all = 0;
    for (int j = 0; j < 16; j++) all += sum[j];
    return all;
}
"""


class Traits(ctypes.Structure):
    """ggml_type_traits_cpu."""

    _fields_ = (
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


def helper() -> ctypes.CDLL:
    """The two loops above, compiled for this machine."""
    folder = Path(tempfile.mkdtemp())
    (folder / "loops.c").write_text(C_SOURCE)
    target = folder / "loops.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", target, folder / "loops.c"], check=True)
    lib = ctypes.CDLL(str(target))
    lib.read_all.restype = ctypes.c_uint64
    lib.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.dots.restype = None
    lib.dots.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long,
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    return lib


def ggml_cpu() -> ctypes.CDLL:
    """ggml's CPU kernels, initialized."""
    base = Path(ggml_ref.library()._name)
    lib = ctypes.CDLL(str(base.with_name(base.name.replace("base", "cpu"))))
    lib.ggml_cpu_init()
    lib.ggml_get_type_traits_cpu.restype = ctypes.POINTER(Traits)
    return lib


def in_threads(workers: int, call: Callable[[int], Any]) -> None:
    """call(i) for each worker; calls give up the interpreter lock."""
    if workers == 1:
        call(0)
        return
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(call, range(workers)))


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bandwidth(loops: ctypes.CDLL, most: int, repeats: int) -> dict[int, float]:
    """GB/s of reading, by threads; 64 MiB a thread."""
    words = 8 << 20
    memory = np.ones(words * most, np.uint64)
    found = {}
    for n in sorted({1, 2, 4, 8, most} & set(range(1, most + 1))):
        with ThreadPoolExecutor(n) as pool:

            def read(i: int) -> None:
                loops.read_all(memory.ctypes.data + 8 * words * i, words)

            times = [
                seconds(lambda p=pool, n=n: list(p.map(read, range(n)))) for _ in range(repeats)
            ]
        found[n] = 8 * words * n / statistics.median(times) / 1e9
    return found


def weights(name: str, n_bytes: int) -> dict[str, Weight]:
    """The same matrix of about that many bytes in both layouts."""
    piece = make_weight(name, 64, N_COLS, np.random.default_rng(0)).data.numpy()
    raw = np.tile(piece, (max(1, n_bytes // piece.nbytes), 1))
    memory = torch.empty(tile_plan(name, len(raw), N_COLS).n_bytes, dtype=torch.uint8)
    encode_into(name, raw, memory.numpy())
    return {
        "native": Weight(name, len(raw), N_COLS, torch.from_numpy(raw)),
        "tiles": Weight(name, len(raw), N_COLS, memory, 1.0, "tiles"),
    }


def ggml_variant(
    cpu: ctypes.CDLL, loops: ctypes.CDLL, w: Weight, x: np.ndarray, workers: int
) -> Callable[[], None] | None:
    """One pass over the matrix by vec_dot; None where ggml has none for the type."""
    traits = cpu.ggml_get_type_traits_cpu(TYPES[w.type].ggml_id).contents
    if not traits.vec_dot:
        return None
    other = cpu.ggml_get_type_traits_cpu(traits.vec_dot_type).contents
    n_bytes = 8 * N_COLS
    quantized = np.zeros((len(x), n_bytes), np.uint8)
    for t in range(len(x)):
        other.from_float(x[t].ctypes.data, quantized[t].ctypes.data, N_COLS)
    raw = w.data.numpy()
    out = np.zeros((workers, 64), np.float32)
    cuts = np.linspace(0, w.n_rows, workers + 1).astype(int)

    def part(i: int) -> None:
        rows = raw[cuts[i] : cuts[i + 1]]
        loops.dots(
            traits.vec_dot, N_COLS, rows.ctypes.data, raw.shape[1], len(rows),
            quantized.ctypes.data, n_bytes, len(x), out[i].ctypes.data,
        )  # fmt: skip

    return lambda: in_threads(workers, part)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="Q8_0,Q4_K,Q6_K,IQ3_S,IQ3_XXS,IQ4_NL,MXFP4,Q2_0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mb", type=int, default=96, help="of weights for one thread; all: 3 x")
    parser.add_argument("--json")
    options = parser.parse_args()
    loops, cpu = helper(), ggml_cpu()
    isas = [isa for isa in available_isas() if isa != "portable"] or ["portable"]
    most = CpuPool().workers
    result: dict[str, Any] = {"workers": most, "columns": N_COLS, "rows": []}
    result["read_gb_s"] = bandwidth(loops, most, 3 * options.repeats)
    print("read GB/s by threads:", {n: round(v, 1) for n, v in result["read_gb_s"].items()})
    for workers in sorted({1, most}):
        pools = {isa: CpuPool(workers, isa=isa) for isa in isas}
        for name in options.types.split(","):
            matrices = weights(name, options.mb * (1 if workers == 1 else 3) << 20)
            result["rows"] += measure(name, matrices, pools, workers, loops, cpu, options.repeats)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def measure(
    name: str,
    matrices: dict[str, Weight],
    pools: dict[str, CpuPool],
    workers: int,
    loops: ctypes.CDLL,
    cpu: ctypes.CDLL,
    repeats: int,
) -> list[dict[str, Any]]:
    """All variants of one type, in turns; prints a line for each."""
    x = np.random.default_rng(1).standard_normal((max(ROWS), N_COLS)).astype(np.float32)
    variants: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for n in ROWS:
        for isa, pool in pools.items():
            for layout, w in matrices.items():
                out = torch.empty(n, w.n_rows)
                part = torch.from_numpy(x[:n])
                variants[layout, isa, n] = lambda p=pool, w=w, x=part, o=out: p.linear(w, x, o)
        theirs = ggml_variant(cpu, loops, matrices["native"], x[:n], workers)
        if theirs is not None:
            variants["native", "ggml", n] = theirs
    times: dict[tuple[str, str, int], list[float]] = {key: [] for key in variants}
    for turn in range(repeats + 1):
        for key, call in variants.items():
            spent = seconds(call)
            if turn:
                times[key].append(spent)
    lines = []
    for (layout, isa, n), spent in times.items():
        w, median = matrices[layout], statistics.median(spent)
        line = {
            "type": name, "layout": layout, "kernels": isa, "threads": workers, "rows": n,
            "gb_s": round(w.n_bytes / median / 1e9, 2),
            "gweights_s": round(w.n_rows * N_COLS * n / median / 1e9, 2),
        }  # fmt: skip
        print(*(f"{value}".rjust(9) for value in line.values()), flush=True)
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
