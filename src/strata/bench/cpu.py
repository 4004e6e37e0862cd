"""strata bench cpu: how fast this machine reads memory, and how fast it computes rows of weights.

Every type is measured in both layouts, with each instruction set and number of activation rows, in
turns with plain reading of memory and, if asked for, ggml's dot products. Matrices come from more
memory than the caches hold. ``measure`` gives a dictionary that is the JSON file (docs/DETAILS.md).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from strata.bench.cpu_experts import EXPERTS, measure_experts
from strata.bench.cpu_measure import (
    CpuTimes,
    Variant,
    others_share,
    rates,
    ratio,
    read_variant,
    spread,
    take_turns,
)
from strata.bench.cpu_memory import CHUNK_BYTES, Arena, arena_bytes, chunk_rows, random_rows
from strata.bench.ggml_rows import Ggml
from strata.formats.tile_formats import tile_format
from strata.formats.tiles import Layout
from strata.kernels.weight import Weight
from strata.memory.budget import Probes, ram_limits, smallest
from strata.native import CpuPool, available_isas
from strata.native.caches import cache_bytes
from strata.native.topology import plan_affinity, read_topology

SCHEMA = "strata bench cpu 1"
N_COLS = 2560
IDLE_SECONDS = 0.3
MOST_BUSY = 0.05
"""Share of the processors' time used by other programs from which numbers are called doubtful."""

Step = Callable[[str, int, int], None]
"""(what is measured now, steps done, steps in all)"""


@dataclass(frozen=True)
class CpuOptions:
    """What is measured. threads, isas: empty for the defaults of this machine.

    seconds: for each type and number of threads. experts: 0 leaves whole experts out.
    """

    types: tuple[str, ...]
    rows: tuple[int, ...] = (1, 2, 4, 8)
    threads: tuple[int, ...] = ()
    isas: tuple[str, ...] = ()
    seconds: float = 2.0
    against: tuple[str, ...] = ()
    experts: int = EXPERTS


@dataclass(frozen=True, order=True)
class Key:
    """One row of the table. layout "read": memory alone; kernels: an instruction set or "ggml"."""

    layout: str
    kernels: str = ""
    rows: int = 0


@dataclass
class Bench:
    """Everything that lives as long as one measurement."""

    options: CpuOptions
    threads: tuple[int, ...]
    isas: tuple[str, ...]
    arenas: dict[str, Arena]
    ggml: Ggml | None
    step: Step
    n_steps: int
    done: int = 0
    cpus: dict[int, list[int]] = field(default_factory=dict)

    def next(self, what: str) -> None:
        """Tell what comes now."""
        self.step(what, self.done, self.n_steps)
        self.done += 1


def measure(options: CpuOptions, step: Step | None = None) -> dict[str, Any]:
    """Everything, as docs/DETAILS.md describes it. SettingError before any work for what cannot be.

    step: called before every measurement, from this thread.
    """
    topology = read_topology()
    threads = options.threads or tuple(sorted({1, topology.default_workers}))
    ggml = Ggml() if "ggml" in options.against else None
    cache, free = cache_bytes(), smallest(ram_limits(Probes())).n_bytes
    size = arena_bytes(cache, free)
    isas = options.isas or default_isas()
    torch.set_num_threads(1)  # two pools of threads would fight over the cores
    bench = Bench(
        options, threads, isas,
        {name: Arena(size, topology.nodes) for name in ("read", "native", "tiles")},
        ggml, step or (lambda what, done, total: None),
        n_steps=1 + len(options.types) * (len(threads) + bool(options.experts)),
        cpus={n: plan_affinity(topology, n) for n in range(1, max(threads) + 1)},
    )  # fmt: skip
    load, before = os.getloadavg()[0], cpu_times()
    found: dict[str, Any] = {"read": _read(bench), "rows": [], "handover": []}
    for n in threads:
        with _pools(bench, n) as pools:
            for name in options.types:
                bench.next(f"{name}, {_threads(n)}")
                found["rows"] += _rows(bench, name, n, pools)
            found["handover"].append({"threads": n, **handover(pools[isas[-1]])})
    found["experts"] = _experts(bench, free)
    bench.step("done", bench.done, bench.n_steps)
    busy = others_share(before, cpu_times())
    machine = describe(cache, size, load, busy)
    return {"schema": SCHEMA, "machine": machine, "options": _options(bench), **found}


def default_isas() -> tuple[str, ...]:
    """All that run here but the portable kernels, unless there are no others."""
    return tuple(isa for isa in available_isas() if isa != "portable") or ("portable",)


def describe(cache: int, arena: int, load: float, busy: float) -> dict[str, Any]:
    """The machine, as far as numbers depend on it."""
    return {
        "processor": processor_name(),
        "cores": read_topology().n_cores,
        "cpus": len(read_topology().cpus),
        "nodes": len(read_topology().nodes),
        "isas": list(available_isas()),
        "cache_bytes": cache,
        "arena_bytes": arena,
        "load_average_before": round(load, 2),
        "other_programs_share": round(busy, 3),
        "quiet": busy <= MOST_BUSY,
    }


def processor_name(root: Path | None = None) -> str:
    """Model name by the system; the architecture where it gives none."""
    try:
        lines = ((root or Path("/")) / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_times() -> CpuTimes:
    """Processor seconds up to now."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    # guest time is counted in user time already
    total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
    return CpuTimes(total - idle, total, own.user + own.system)


def _options(bench: Bench) -> dict[str, Any]:
    options = asdict(bench.options) | {"threads": bench.threads, "isas": bench.isas}
    if bench.ggml is not None:
        options["ggml"] = bench.ggml.name
    return options | {"n_cols": N_COLS}


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"


@contextmanager
def _pools(bench: Bench, n: int) -> Iterator[dict[str, CpuPool]]:
    with ExitStack() as stack:
        pools = {}
        for isa in bench.isas:
            pools[isa] = CpuPool(n, bench.cpus[n], isa=isa)
            stack.callback(pools[isa].close)
        yield pools


def _read(bench: Bench) -> list[dict[str, Any]]:
    """GB/s of reading by 1, 2, 4 ... and the asked numbers of threads, in turns."""
    most = max(bench.threads)
    counts = sorted({*bench.threads, *(1 << i for i in range(most.bit_length())), most})
    bench.next("reading memory")
    memory = bench.arenas["read"].memory
    with ExitStack() as stack:
        variants = []
        for n in counts:
            pool = CpuPool(n, bench.cpus[n], isa=bench.isas[-1])
            stack.callback(pool.close)
            n_bytes = min(CHUNK_BYTES * n, memory.numel() // 4)
            variants.append(read_variant(n, pool, memory, n_bytes))
        times = take_turns(variants, bench.options.seconds)
    return [
        {"threads": v.key, "gb_s": rates(v.n_bytes / 1e9, times[v.key]).as_dict(2)}
        for v in variants
    ]


def _rows(bench: Bench, name: str, n: int, pools: dict[str, CpuPool]) -> list[dict[str, Any]]:
    """All variants of one type with n threads."""
    rng = np.random.default_rng(0)
    n_rows = chunk_rows(name, N_COLS, n, bench.arenas["native"].memory.numel())
    piece = random_rows(name, min(n_rows, 256), N_COLS, rng)
    raw = np.tile(piece, (-(-n_rows // len(piece)), 1))[:n_rows]
    x = rng.standard_normal((max(bench.options.rows), N_COLS)).astype(np.float32)
    layouts: tuple[Layout, ...] = ("native", "tiles") if tile_format(name) else ("native",)
    reader, memory = pools[bench.isas[-1]], bench.arenas["read"].memory
    variants = [read_variant(Key("read"), reader, memory, min(raw.nbytes, memory.numel() // 4))]
    for layout in layouts:
        chunks = bench.arenas[layout].fill(name, layout, raw, N_COLS)
        for n_x in bench.options.rows:
            for isa, pool in pools.items():
                run = _ours(pool, chunks.matrices, torch.from_numpy(x[:n_x]))
                variants.append(Variant(Key(layout, isa, n_x), chunks.n_bytes, run))
            if layout == "native" and bench.ggml is not None:
                theirs = bench.ggml.rows(name, x[:n_x], n_rows, bench.cpus[n])
                if theirs is not None:
                    run = _theirs(theirs, chunks.matrices)
                    variants.append(Variant(Key(layout, "ggml", n_x), chunks.n_bytes, run))
    times = take_turns(variants, bench.options.seconds)
    return table_rows(name, n, n_rows * N_COLS, variants, times)


def _experts(bench: Bench, free_bytes: int) -> list[dict[str, Any]]:
    """Whole experts with the fastest instruction set and every number of threads."""
    options, lines = bench.options, []
    for name in options.types if options.experts else ():
        bench.next(f"whole {name} experts")
        memory = bench.arenas["read"].memory
        with ExitStack() as stack:
            # pools of their own: they remember on which nodes this type's experts lie
            pools = [CpuPool(n, bench.cpus[n], isa=bench.isas[-1]) for n in bench.threads]
            for pool in pools:
                stack.callback(pool.close)
            lines += measure_experts(
                pools, name, options.rows, options.experts, free_bytes, options.seconds, memory
            )
    return lines


def _ours(pool: CpuPool, matrices: Sequence[Weight], x_TK: torch.Tensor) -> Callable[[int], float]:
    out = torch.empty(x_TK.shape[0], matrices[0].n_rows)

    def run(sample: int) -> float:
        w = matrices[sample % len(matrices)]
        start = time.perf_counter()
        pool.linear(w, x_TK, out)
        return time.perf_counter() - start

    return run


def _theirs(rows: Callable[[Weight], float], matrices: Sequence[Weight]) -> Callable[[int], float]:
    return lambda sample: rows(matrices[sample % len(matrices)])


def table_rows(
    name: str,
    threads: int,
    n_weights: int,
    variants: Sequence[Variant[Key]],
    times: dict[Key, list[float]],
) -> list[dict[str, Any]]:
    """Times of one type as the JSON's rows, in the order of variants.

    gb_s: of weight bytes read. gweights_s: 1e9 weights a second times activation rows. share: of
    what plain reading reached in the same turns. times_ggml: speed against ggml's, turn by turn.
    *_best: of the best samples of both sides, for a machine that was busy.
    """
    read = next(v for v in variants if v.key.layout == "read")
    read_s = [seconds / read.n_bytes for seconds in times[read.key]]
    lines = []
    for v in variants:
        if v is read:
            continue
        spent = times[v.key]
        line: dict[str, Any] = {
            "type": name,
            "layout": v.key.layout,
            "kernels": v.key.kernels,
            "threads": threads,
            "rows": v.key.rows,
            "bits": round(8 * v.n_bytes / n_weights, 4),
            "gb_s": rates(v.n_bytes / 1e9, spent).as_dict(2),
            "gweights_s": rates(n_weights * v.key.rows / 1e9, spent).as_dict(2),
            "share": round(ratio(read_s, [s / v.n_bytes for s in spent]), 3),
            "share_best": round(min(read_s) * v.n_bytes / min(spent), 3),
        }
        theirs = times.get(Key("native", "ggml", v.key.rows))
        if theirs is not None and v.key.kernels != "ggml":
            line["times_ggml"] = round(ratio(theirs, spent), 2)
            line["times_ggml_best"] = round(min(theirs) / min(spent), 2)
        lines.append(line)
    return lines


def handover(pool: CpuPool) -> dict[str, Any]:
    """Microseconds from handing an empty job over to its last worker's end: called while workers
    look for work, from C++ and from Python, and while they sleep; and the share of a processor
    that the idle pool takes."""
    awake = pool.measure_handover(1000)
    asleep = pool.measure_handover(100, pause_us=2000)
    before = psutil.Process().cpu_times()
    time.sleep(IDLE_SECONDS)
    after = psutil.Process().cpu_times()
    spent = after.user + after.system - before.user - before.system
    return {
        "us": spread(awake.native_us.tolist()).as_dict(2),
        "python_us": spread(awake.python_us.tolist()).as_dict(2),
        "asleep_us": spread(asleep.native_us.tolist()).as_dict(2),
        "idle_share": round(max(spent, 0.0) / IDLE_SECONDS, 3),
    }
