"""Speed and bits of the GPU's weight products: dense matrices, float rows, experts.

    PYTHONPATH=src python bench/gpu_rows.py [--part linear|float|experts|host|prompt] [--types A,B]
        [--tokens 1,2,4,8] [--sweep] [--no-verify]

Weights are random tiles made on the device; several copies are read in turn, so that the second-
level cache cannot hold them. Time is the median of replays of one CUDA graph. A line gives
microseconds a launch, GB/s of weight bytes, and their share of the peak. With --sweep other
divisions into programs are tried and the best is printed beside the rule's own.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from strata.formats.tiles import TileFormat, tile_format, tile_plan
from strata.kernels.expert_rows import ExpertShape, expert_rows_contract, layout
from strata.kernels.expert_rows.launch import (
    GpuGroups,
    RowTuning,
    batch_of,
    gpu_expert,
    new_groups,
    new_hidden,
    row_tuning,
)
from strata.kernels.expert_rows.triton import down, gate_up
from strata.kernels.expert_rows.triton_gemm import expert_rows_many, groups_of_rows
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear import linear_contract
from strata.kernels.linear.launch import Tuning
from strata.kernels.linear.triton import linear
from strata.kernels.linear.triton_gemm import (
    GemmTuning,
    half_rows,
    linear_many,
    new_half_rows,
)
from strata.kernels.quantize import Quantized, new_quantized
from strata.kernels.quantize.triton import quantize
from strata.kernels.weight import Weight

PEAK_GB_S = 4800.0
PEAK_TFLOPS = 990.0
DENSE = [(2560, 10240), (2560, 6144), (6144, 2560), (2560, 512), (10240, 320), (320, 10240)]
FLOAT = [(10240, 320), (320, 10240), (2560, 512)]
TYPES = ["Q8_0", "Q4_K", "Q6_K", "IQ3_S", "IQ4_NL", "IQ2_S", "Q2_0", "MXFP4", "BF16"]
EXPERTS = [("IQ3_S", "IQ4_NL"), ("IQ3_XXS", "IQ4_NL"), ("IQ2_S", "Q2_0"), ("Q4_K", "Q8_0")]
COLD_BYTES = 400 << 20
"""Read before a copy is read again: several times the second-level cache."""
D_MODEL, D_EXPERT = 2560, 640


def fill_tiles(blob: torch.Tensor, type_name: str, n_rows: int, n_cols: int) -> None:
    """Random codes and sane scales into uint8 [n_bytes] on the device."""
    form, plan = tile_format(type_name), tile_plan(type_name, n_rows, n_cols)
    assert form is not None
    blob.copy_(torch.randint(0, 256, blob.shape, dtype=torch.uint8, device=blob.device))
    ends = [plan.n_bytes] * 2 if plan.minimums < 0 else [plan.minimums, plan.n_bytes]
    for start, end in ((plan.scales, ends[0]), (plan.minimums, ends[1]), (plan.supers, -1)):
        if start >= 0:
            stop = plan.n_bytes if end < 0 else min(end, plan.supers) if plan.supers > 0 else end
            _fill_scales(blob[start:stop], form, supers=start == plan.supers)


def _fill_scales(part: torch.Tensor, form: TileFormat, supers: bool) -> None:
    if supers or form.scale == "F16":
        small = torch.rand(len(part) // 2, device=part.device) * 1e-3
        part.copy_(small.half().view(torch.uint8))
    elif form.scale == "E8M0":
        part.copy_(torch.randint(116, 124, part.shape, dtype=torch.uint8, device=part.device))
    elif form.scale == "UE4M3":
        part.copy_(torch.randint(8, 32, part.shape, dtype=torch.uint8, device=part.device))


def random_weight(type_name: str, n_rows: int, n_cols: int) -> GpuWeight:
    """A matrix on the device."""
    if type_name in ("BF16", "F16", "F32"):
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[type_name]
        data = (torch.randn(n_rows, n_cols, device="cuda") * 0.05).to(dtype)
    else:
        n_bytes = tile_plan(type_name, n_rows, n_cols).n_bytes
        data = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
        fill_tiles(data, type_name, n_rows, n_cols)
    return GpuWeight(type_name, n_rows, n_cols, data)


def graph_us(launches: Sequence[Callable[[], None]], replays: int = 12) -> float:
    """Median microseconds a launch of a graph of all launches in order."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times[3:])) * 1e3 / len(launches)


def line(name: str, us: float, n_bytes: int, more: str = "") -> None:
    """One result."""
    rate = n_bytes / us / 1e3
    print(f"{name:44s} {us:8.2f} us {rate:7.0f} GB/s {100 * rate / PEAK_GB_S:5.1f} % {more}")


def inputs(n_tokens: int, n_cols: int) -> tuple[torch.Tensor, Quantized]:
    """Random activations, plain and quantized."""
    x = torch.randn(n_tokens, n_cols, device="cuda")
    x_q = new_quantized(n_tokens, n_cols, "cuda")
    quantize(x, x_q)
    return x, x_q


def same(got: torch.Tensor, expected: torch.Tensor) -> str:
    """ "equal", or how many numbers differ."""
    wrong = int((got.cpu().view(torch.int32) != expected.view(torch.int32)).sum())
    return "equal" if wrong == 0 else f"{wrong} of {expected.numel()} DIFFER"


def tunings(is_float: bool) -> list[Tuning]:
    """Divisions that a sweep tries."""
    if is_float:
        return [Tuning(w, 16, r, 1) for w, r in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16))]
    tiles = [(1, 4), (1, 8), (1, 16), (2, 16), (2, 32), (4, 32), (4, 64)]
    spread = [(1, 8, 2), (2, 8, 4), (4, 8, 8), (2, 16, 2), (4, 16, 4)]
    return [
        *(Tuning(w, r, 1, s) for (w, r), s in itertools.product(tiles, (3, 4, 5, 7))),
        *(Tuning(w, r, 1, 0, b) for w, r, b in spread),
    ]


def measure_linear(
    type_name: str, n_cols: int, n_rows: int, n_tokens: int, sweep: bool, verify: bool
) -> None:
    """One dense matrix alone in its launch."""
    block = {"Q4_K": 256, "Q6_K": 256, "IQ3_S": 256, "IQ2_S": 256, "Q2_0": 64}.get(type_name, 32)
    if n_cols % block:
        return
    first = random_weight(type_name, n_rows, n_cols)
    copies = max(2, min(64, COLD_BYTES // first.n_bytes))
    weights = [first] + [random_weight(type_name, n_rows, n_cols) for _ in range(copies - 1)]
    x, x_q = inputs(n_tokens, n_cols)
    out = torch.empty(n_tokens, n_rows, device="cuda")

    def time(tuning: Tuning | None) -> float:
        return graph_us([lambda w=w: linear([w], [out], x, x_q, tuning) for w in weights])

    us, more = time(None), ""
    if sweep:
        found = []
        for tuning in tunings(not first.is_tiles):
            try:
                found.append((time(tuning), tuning))
            except Exception as error:  # a division that does not fit the machine
                print("  skipped", tuning, str(error).splitlines()[0][:80])
        best, tuning = min(found, key=lambda pair: pair[0])
        more = f"best {best:.2f} us {tuning}"
    if verify and first.is_tiles:
        linear([first], [out], x, x_q)
        host = Weight(type_name, n_rows, n_cols, first.data.cpu(), layout="tiles")
        more += " " + same(out, linear_contract(x.cpu(), host))
    elif verify:
        alone = torch.empty(1, n_rows, device="cuda")
        linear([first], [out], x, x_q)
        linear([first], [alone], x[-1:].clone(), None)
        exact = x.double() @ first.data.double().T
        error = float((out - exact).norm() / exact.norm())
        more += f" error {error:.1e}, alone {same(alone, out[-1:].cpu())}"
    line(f"{type_name} {n_cols}->{n_rows} T={n_tokens}", us, first.n_bytes, more)


def random_blob(shape: ExpertShape, blob: torch.Tensor) -> None:
    """An expert on the device."""
    sizes = ((D_EXPERT, D_MODEL), (D_EXPERT, D_MODEL), (D_MODEL, D_EXPERT))
    offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
    for kind, size, start, n in zip(shape.types, sizes, offsets, shape.matrix_bytes, strict=True):
        part = blob[start : start + n]
        if kind == "BF16":
            part.copy_(
                (torch.randn(size, device="cuda") * 0.05).bfloat16().view(-1).view(torch.uint8)
            )
        else:
            fill_tiles(part, kind, *size)


def table(n_groups: int, n_tokens: int, n_active: int, pool: torch.Tensor, seed: int) -> GpuGroups:
    """Groups of distinct random blobs of the pool [E, bytes]; rows spread evenly."""
    rng = np.random.default_rng(seed)
    n_rows = n_tokens * n_active
    groups = new_groups(n_rows, "cuda")
    chosen = rng.choice(len(pool), n_groups, replace=False)
    owner = np.sort(np.arange(n_rows) % n_groups)
    start = np.searchsorted(owner, np.arange(n_groups + 1))
    # the rows of a group belong to different tokens
    row = np.concatenate(
        [np.flatnonzero(np.arange(n_rows) % n_groups == g) for g in range(n_groups)]
    )
    addresses = [pool.data_ptr() + int(e) * pool.shape[1] for e in chosen]
    groups.addr[:n_groups] = torch.tensor(addresses)
    groups.start[: n_groups + 1] = torch.from_numpy(start.astype(np.int32))
    groups.entry_row[:] = torch.from_numpy(row.astype(np.int32))
    groups.entry_token[:] = torch.from_numpy((row // n_active).astype(np.int32))
    groups.n_groups[0] = n_groups
    return groups


def measure_experts(
    types: tuple[str, str], n_groups: int, n_tokens: int, sweep: bool, verify: bool, host: bool
) -> None:
    """gate_up and down of n_groups experts, from VRAM or from page-locked RAM."""
    kinds = (types[0], types[0], types[1])
    layouts = tuple("native" if kind == "BF16" else "tiles" for kind in kinds)
    shape = layout(D_MODEL, D_EXPERT, kinds, layouts=layouts)  # type: ignore[arg-type]
    expert = gpu_expert(shape)
    count = max(n_groups + 1, min(400, (2 << 30) // shape.blob_bytes))
    pool = torch.empty(count, shape.blob_bytes, dtype=torch.uint8, device="cuda")
    for blob in pool:
        random_blob(shape, blob)
    source = pool.cpu().pin_memory() if host else pool
    tables = [table(n_groups, n_tokens, 10, source, seed) for seed in range(4 if host else 24)]
    x, x_q = inputs(n_tokens, D_MODEL)
    n_rows = n_tokens * 10
    hidden = new_hidden(expert, n_rows, "cuda")
    rows = torch.empty(n_rows, D_MODEL, device="cuda")
    batch = batch_of(n_tokens)

    def first(tuning: RowTuning | None) -> float:
        return graph_us([lambda g=g: gate_up(expert, g, x, x_q, hidden, tuning) for g in tables])

    def second(tuning: RowTuning | None) -> float:
        return graph_us(
            [lambda g=g: down(expert, g, hidden, rows, n_tokens, tuning) for g in tables]
        )

    sizes = shape.matrix_bytes
    name = f"{types[0]}+{types[1]} G={n_groups} T={n_tokens}{' RAM' if host else ''}"
    for half, time, n_bytes, tries in (
        ("gate_up", first, sizes[0] + sizes[1], _gate_up_tunings(batch, expert.twins)),
        ("down", second, sizes[2], _down_tunings(batch)),
    ):
        us, more = time(None), ""
        if sweep and expert.tiles_in and expert.tiles_out:
            best, tuning = min(((time(t), t) for t in tries), key=lambda pair: pair[0])
            more = f"best {best:.2f} us {tuning}"
        line(f"{name} {half}", us, n_groups * n_bytes, more)
    if verify:

        def both() -> None:
            gate_up(expert, tables[0], x, x_q, hidden)
            down(expert, tables[0], hidden, rows, n_tokens)

        _verify_rows(shape, tables[0], source, x, rows, both)


def _gate_up_tunings(batch: int, twins: bool) -> list[RowTuning]:
    choices = itertools.product((2, 4, 8), (32, 64), (2, 3, 4, 5))
    return [row_tuning(w, r, s, batch, twins) for w, r, s in choices]


def _down_tunings(batch: int) -> list[RowTuning]:
    return [row_tuning(w, r, s, batch) for w, r in ((1, 16), (2, 32), (4, 64)) for s in (2, 3, 4)]


def _verify_rows(
    shape: ExpertShape,
    groups: GpuGroups,
    pool: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    launch: Callable[[], None],
) -> None:
    """The first group's rows against the contract."""
    rows.fill_(float("nan"))
    launch()
    torch.cuda.synchronize()
    number = (int(groups.addr[0]) - pool.data_ptr()) // pool.shape[1]
    blob = pool[number].cpu().clone()
    for entry in range(int(groups.start[1])):
        row, token = int(groups.entry_row[entry]), int(groups.entry_token[entry])
        expected = expert_rows_contract(shape, blob, x[token : token + 1].cpu())[0]
        if shape.gate_type == "BF16":
            error = float((rows[row].cpu() - expected).norm() / expected.norm())
            print(f"    row {row}: error {error:.1e}")
        else:
            print(f"    row {row}: {same(rows[row], expected)}")


def measure_prompt(type_name: str, n_tokens: int, sweep: bool) -> None:
    """2560 -> 10240 on tensor cores, and a quarter of a layer's experts."""
    n_rows, n_cols = 10240, D_MODEL
    weights = [random_weight(type_name, n_rows, n_cols) for _ in range(3)]
    half, out = (
        new_half_rows(n_tokens, n_cols, "cuda"),
        torch.empty(n_tokens, n_rows, device="cuda"),
    )
    half_rows(torch.randn(n_tokens, n_cols, device="cuda"), half)
    tries: list[GemmTuning | None] = [None]
    if sweep:
        sizes = ((128, 128, 8), (128, 64, 4), (64, 128, 4), (128, 256, 8))
        tries += [GemmTuning(t, r, 64, w, 3) for t, r, w in sizes]
    for tuning in tries:
        us = graph_us([lambda w=w, g=tuning: linear_many(w, out, half, g) for w in weights])
        flops(
            f"{type_name} {n_cols}->{n_rows} T={n_tokens} {tuning or ''}",
            us,
            n_tokens * n_rows * n_cols,
        )
    if type_name == "BF16":
        return
    shape = layout(D_MODEL, D_EXPERT, (type_name, type_name, "Q8_0"), layouts=("tiles",) * 3)
    pool = torch.empty(128, shape.blob_bytes, dtype=torch.uint8, device="cuda")
    for blob in pool:
        random_blob(shape, blob)
    n = n_tokens * 10 // 4
    address = pool.data_ptr() + torch.arange(128, device="cuda") * shape.blob_bytes
    chosen = torch.randint(0, 128, (n,), device="cuda", dtype=torch.int32)
    groups = groups_of_rows(chosen, 1, address)
    groups = replace(groups, entry_token=groups.entry_token % n_tokens)
    h, rows = torch.empty(n, D_EXPERT, device="cuda"), torch.empty(n, D_MODEL, device="cuda")
    h_half = new_half_rows(n, D_EXPERT, "cuda")

    def experts() -> None:
        expert_rows_many(gpu_expert(shape), groups, half, h, h_half, rows)

    us = graph_us([experts] * 2)
    flops(f"{type_name} 128 experts, {n} rows", us, 3 * n * D_MODEL * D_EXPERT)


def flops(name: str, us: float, products: int) -> None:
    """One result of tensor cores."""
    rate = 2 * products / us / 1e6
    print(f"{name:44s} {us:8.2f} us {rate:7.1f} TFLOP/s {100 * rate / PEAK_TFLOPS:5.1f} %")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="linear,float,experts,host")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-verify", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    parts, verify = args.part.split(","), not args.no_verify
    tokens = [int(t) for t in args.tokens.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__)
    if "linear" in parts:
        for name, (k, n), t in itertools.product(args.types.split(","), DENSE, tokens):
            if name != "BF16":
                # the full reference is slow: the smallest output width speaks for all
                measure_linear(name, k, n, t, args.sweep, verify and n == 512)
    if "float" in parts:
        for (k, n), t in itertools.product(FLOAT, tokens):
            measure_linear("BF16", k, n, t, args.sweep, verify)
    if "experts" in parts:
        for types, groups in itertools.product([*EXPERTS, ("BF16", "BF16")], (10, 30)):
            n_tokens = 1 if groups == 10 else 4
            measure_experts(types, groups, n_tokens, args.sweep, verify, host=False)
    if "host" in parts:
        measure_experts(EXPERTS[0], 4, 1, False, verify, host=True)
    if "prompt" in parts:
        for name, t in itertools.product(("Q6_K", "IQ4_NL", "BF16"), (512, 4096)):
            measure_prompt(name, t, args.sweep)


if __name__ == "__main__":
    main()
