"""Time of every kernel around the matrix products on one GPU, at the flagship's sizes.

Each case is recorded as one CUDA graph that goes over several copies of its inputs (more bytes than
the L2 cache holds where that fits), so launch gaps are those of a replay. Prints microseconds per
call (median of replays), the bytes a call must move, and their share of the time: bytes / 4.8 TB/s
over the measured time. "call" may be more than one launch; the column says how many.

    PYTHONPATH=src:. python bench/gpu_mix.py [--tokens 1,4] [--context 1024,30000] [--only gdn]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from strata.kernels.attention import triton as attention
from strata.kernels.attention import triton_append as attention_append
from strata.kernels.embed import triton as embed
from strata.kernels.gdn import triton as gdn
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.hyper import triton as hyper
from strata.kernels.hyper import triton_read as hyper_read
from strata.kernels.kv_quant.triton import KvScales
from strata.kernels.mla import triton as mla
from strata.kernels.ngram import triton as ngram
from strata.kernels.plan import triton as plan
from strata.kernels.pointwise.triton import scale_rows
from strata.kernels.qsa import triton as qsa
from strata.kernels.quantize import new_quantized
from strata.kernels.rms_norm.triton import Pending, add_norm
from strata.kernels.rotary.triton import rotary_table
from strata.kernels.router import triton as router
from strata.kernels.sample import triton as sample
from strata.models.spec import RotarySpec

D, C, RANK = 2560, 4, 320
H, G, HEAD = 24, 2, 256
INDEX_HEADS, INDEX_DIM, BLOCK_TOKENS, BUDGET = 4, 128, 4, 512
KEY_HEADS, VALUE_HEADS, STATE, TAPS = 16, 48, 128, 4
EXPERTS, ACTIVE, VOCAB = 512, 10, 248320
EPS, PEAK_BYTES = 1e-6, 4.8e12
CACHE_BYTES, MOST_COPIES = 150e6, 48


@dataclass(frozen=True)
class Case:
    """make() returns the call for one copy of the inputs; n_bytes: what a call must move."""

    name: str
    launches: int
    n_bytes: int
    make: Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Groups:
    """What kernels/expert_rows takes."""

    addr: torch.Tensor
    start: torch.Tensor
    entry_row: torch.Tensor
    entry_token: torch.Tensor
    n_groups: torch.Tensor


class Maker:
    """Random tensors on a device for windows of T tokens that end at a context of n."""

    def __init__(self, device: torch.device, n_tokens: int, context: int) -> None:
        self.device, self.T, self.context = device, n_tokens, context
        self.pos = self.ints(range(context - n_tokens, context))

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def ints(self, values: range | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def weight(self, rows: int, cols: int) -> GpuWeight:
        return GpuWeight("BF16", rows, cols, self.floats(rows, cols, dtype=torch.bfloat16) * 0.02)


def hyper_cases(m: Maker) -> Iterator[Case]:
    n_tokens, wide = m.T, C * D

    def read() -> Callable[[], None]:
        residual, weight, x = m.floats(m.T, C, D), m.floats(wide), m.floats(m.T, wide)
        pending = Pending(m.floats(m.T, D) * 1e-3, m.floats(m.T, C) * 1e-3)
        return lambda: add_norm(residual, weight, EPS, x, pending=pending)

    def plain() -> Callable[[], None]:
        residual, weight, x = m.floats(m.T, D), m.floats(D), m.floats(m.T, D)
        pending, q = Pending(m.floats(m.T, D) * 1e-3), new_quantized(m.T, D, m.device)
        return lambda: add_norm(residual, weight, EPS, x, pending=pending, quantized=q)

    def down() -> Callable[[], None]:
        xn, w, inject = m.floats(m.T, wide), m.weight(RANK, wide), m.weight(C, wide)
        lo, coeff = m.floats(m.T, RANK), m.floats(m.T, C)
        return lambda: hyper.down(xn, w, inject, C, lo, coeff)

    def up() -> Callable[[], None]:
        lo, w, xn = m.floats(m.T, RANK), m.weight(wide, RANK), m.floats(m.T, wide)
        x, q = m.floats(m.T, D), new_quantized(m.T, D, m.device)
        return lambda: hyper.up_mix(lo, w, xn, C, x, q)

    def whole() -> Callable[[], None]:
        xn, lo, coeff, x = (m.floats(1, n) for n in (wide, RANK, C, D))
        weights = hyper_read.StreamWeights(
            m.floats(wide), m.weight(RANK, wide), m.weight(C, wide), m.weight(wide, RANK), EPS
        )
        residual, pending = m.floats(1, C, D), Pending(m.floats(1, D) * 1e-3, m.floats(1, C) * 1e-3)
        q, turns = new_quantized(1, D, m.device), hyper_read.new_turns(m.device)
        return lambda: hyper_read.read(weights, residual, pending, xn, lo, coeff, x, q, turns)

    if n_tokens == 1:
        moved = 4 * (3 * wide + 2 * D) + 4 * wide + 2 * (2 * RANK + C) * wide
        yield Case("hyper read", 1, moved, whole)
    yield Case("hyper add_norm", 1, 4 * n_tokens * (3 * wide + D) + 4 * wide, read)
    yield Case("hyper down", 1, 2 * (RANK + C) * wide + 4 * n_tokens * wide, down)
    yield Case("hyper up_mix", 1, 2 * RANK * wide + 4 * n_tokens * (wide + D), up)
    yield Case("plain add_norm", 1, 4 * (n_tokens * 4 * D + D), plain)


def gdn_cases(m: Maker) -> Iterator[Case]:
    keys, values = KEY_HEADS * STATE, VALUE_HEADS * STATE
    n = 2 * keys + values

    def make() -> Callable[[], None]:
        projected, gates = m.floats(m.T, n + values), m.floats(m.T, 2 * VALUE_HEADS)
        state = gdn.GdnState(
            m.floats(TAPS + 15, n),
            m.floats(2, VALUE_HEADS, STATE, STATE) * 0.1,
            m.ints([0]),
            m.floats(m.T, VALUE_HEADS, gdn.workspace_numbers(STATE, STATE)),
        )
        weights = gdn.GdnWeights(
            m.floats(TAPS, n), -m.floats(VALUE_HEADS).exp(), m.floats(VALUE_HEADS),
            m.floats(STATE), EPS, KEY_HEADS, STATE, "interleaved", "silu",
        )  # fmt: skip
        count, out = m.ints([m.T]), m.floats(m.T, values)
        q = new_quantized(m.T, values, m.device)
        return lambda: gdn.window(
            projected[:, :n], projected[:, n:], gates[:, :VALUE_HEADS], gates[:, VALUE_HEADS:],
            count, m.pos, state, weights, out, q,
        )  # fmt: skip

    moved = 2 * VALUE_HEADS * STATE * STATE + m.T * (2 * n + 2 * values) + (TAPS - 1) * n
    yield Case("gdn", 1, 4 * moved, make)


def attention_cases(m: Maker) -> Iterator[Case]:
    table = rotary_table(RotarySpec(tuple(0.6**i for i in range(32)), "half"), m.device)
    half = torch.float16
    capacity = -(-m.context // BLOCK_TOKENS)

    def append() -> Callable[[], None]:
        x, y = m.floats(m.T, (2 * H + 2 * G) * HEAD), m.floats(m.T, (INDEX_HEADS + 1) * INDEX_DIM)
        inputs = [
            attention_append.HeadInput(x, 2 * HEAD, None, m.floats(HEAD)),
            attention_append.HeadInput(x[:, 2 * H * HEAD :], HEAD, None, m.floats(HEAD)),
            attention_append.HeadInput(x[:, (2 * H + G) * HEAD :], HEAD),
        ]
        k, v = (m.floats(m.context, G, HEAD, dtype=half) for _ in range(2))
        split = INDEX_HEADS * INDEX_DIM
        indexer = attention_append.IndexerInput(
            attention_append.HeadInput(y[:, :split], INDEX_DIM, None, m.floats(INDEX_DIM)),
            attention_append.HeadInput(y[:, split:], INDEX_DIM, None, m.floats(INDEX_DIM)),
            m.floats(m.T, INDEX_HEADS, INDEX_DIM), m.floats(19, INDEX_DIM),
            m.floats(capacity, INDEX_DIM, dtype=half), BLOCK_TOKENS,
        )  # fmt: skip
        out = m.floats(m.T, H, HEAD)
        return lambda: attention_append.append(*inputs, out, k, v, m.pos, EPS, table, indexer)

    def select() -> Callable[[], None]:
        q = m.floats(m.T, INDEX_HEADS, INDEX_DIM)
        keys = m.floats(capacity, INDEX_DIM, dtype=half)
        scores = m.floats(m.T, capacity)
        blocks = torch.zeros(m.T, BUDGET, dtype=torch.int32, device=m.device)
        return lambda: qsa.select_blocks(q, keys, m.pos, BLOCK_TOKENS, scores, blocks)

    def attend(splits: int, chunk: int, sparse: bool) -> Callable[[], Callable[[], None]]:
        def make() -> Callable[[], None]:
            q, k, v = m.floats(m.T, H, HEAD), *(m.floats(m.context, G, HEAD, dtype=half),) * 2
            scratch = attention.new_scratch(m.T, H, splits, HEAD, m.device)
            out, int8 = m.floats(m.T, H, HEAD), new_quantized(m.T, H * HEAD, m.device)
            picks = torch.stack(
                [
                    torch.randperm(max(capacity - 1, BUDGET))[:BUDGET].sort().values
                    for _ in range(m.T)
                ]
            )
            picked = attention.Selection(picks.int().to(m.device), BLOCK_TOKENS)
            gate = m.floats(m.T, 2 * H * HEAD)
            return lambda: attention.attention(
                q, k, v, m.pos, 1 / 16, scratch, out, selection=picked if sparse else None,
                gate=(gate[:, HEAD:], 2 * HEAD), quantized=int8, chunk=chunk,
            )  # fmt: skip

        return make

    yield Case("append + index", 1, 4 * m.T * (2 * H + 2 * G) * HEAD, append)
    kept = min(m.context, BUDGET * BLOCK_TOKENS + BLOCK_TOKENS - 1)
    if capacity - 1 > BUDGET:
        yield Case("select", 2, 2 * capacity * INDEX_DIM + 8 * m.T * capacity, select)
    for splits, chunk in ((17, 64), (33, 32), (66, 32)):
        n_bytes = 2 * m.T * kept * G * HEAD * 2
        name = f"sparse attention {splits}x{chunk}"
        yield Case(name, 2, n_bytes, attend(splits, chunk, True))
    for splits, chunk in ((64, 32), (64, 64), (128, 64)):
        n_bytes = 2 * m.context * G * HEAD * 2
        name = f"dense attention {splits}x{chunk}"
        yield Case(name, 2, n_bytes, attend(splits, chunk, False))


def encoded_cases(m: Maker) -> Iterator[Case]:
    """Dense attention over caches of 8 and 4 bits."""
    for bits, group in ((8, HEAD), (4, 32)):

        def attend(bits: int = bits, group: int = group) -> Callable[[], None]:
            shape = (m.context, G, HEAD * bits // 8)
            dtype = torch.int8 if bits == 8 else torch.uint8
            k, v = (torch.randint(0, 100, shape, device=m.device).to(dtype) for _ in range(2))
            scales = KvScales(
                *(m.floats(m.context, G, HEAD // group, dtype=torch.float16) for _ in range(2))
            )
            q, out = m.floats(m.T, H, HEAD), m.floats(m.T, H, HEAD)
            scratch = attention.new_scratch(m.T, H, 64, HEAD, m.device)
            return lambda: attention.attention(
                q, k, v, m.pos, 1 / 16, scratch, out, chunk=64, scales=scales
            )

        n_bytes = 2 * m.context * G * (HEAD * bits // 8 + 2 * HEAD // group)
        yield Case(f"dense attention {bits} bits", 2, n_bytes, attend)


def mla_cases(m: Maker) -> Iterator[Case]:
    """Latent attention at DeepSeek V3's sizes."""
    heads, rank, rope, nope, value = 128, 512, 64, 128, 128
    table = rotary_table(RotarySpec(tuple(0.6**i for i in range(rope // 2)), "pairs"), m.device)

    def cache() -> torch.Tensor:
        return m.floats(m.context, rank + rope, dtype=torch.float16)

    def append() -> Callable[[], None]:
        row, norm, q = m.floats(m.T, rank + rope), m.floats(rank), m.floats(m.T, heads, nope + rope)
        k_b, rows, out = m.weight(heads * nope, rank), cache(), m.floats(m.T, heads, rank + rope)
        return lambda: mla.append(row, norm, q, k_b, m.pos, rows, out, EPS, table)

    def attend() -> Callable[[], None]:
        q, rows, v_b = m.floats(m.T, heads, rank + rope), cache(), m.weight(heads * value, rank)
        scratch = attention.new_scratch(m.T, heads, 16, rank, m.device)
        out, int8 = m.floats(m.T, heads, value), new_quantized(m.T, heads * value, m.device)
        return lambda: mla.attend(q, rows, v_b, m.pos, 0.07, scratch, out, quantized=int8)

    yield Case("mla append", 1, 2 * heads * nope * rank, append)
    n_bytes = 2 * heads * value * rank + 2 * m.context * (rank + rope)
    yield Case("mla attend", 2, n_bytes, attend)


def plan_cases(m: Maker) -> Iterator[Case]:
    n_rows = m.T * ACTIVE

    def ints(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype, device=m.device)

    def route() -> Callable[[], None]:
        logits, expert, weight = m.floats(m.T, EXPERTS), ints(n_rows), m.floats(n_rows)
        return lambda: router.route(
            logits, expert, weight, n_active=ACTIVE, scoring="softmax", normalize=True
        )

    def both() -> Callable[[], None]:
        logits, expert, weight = m.floats(m.T, EXPERTS), ints(n_rows), m.floats(n_rows)
        vram, host = (
            torch.randint(0, 2, (EXPERTS,), device=m.device).to(torch.int64) << 12 for _ in range(2)
        )
        rules = plan.PlanRules(
            m.ints([n * 77 >> 8 for n in range(1, 81)]),
            torch.tensor([-1.0], device=m.device),
            m.ints([0]),
        )
        place = ints(n_rows, torch.int8)
        addr, start = ints(n_rows, torch.int64), ints(n_rows + 1)
        groups = Groups(addr, start, ints(n_rows), ints(n_rows), ints(1))
        scratch = plan.new_scratch(EXPERTS, m.device)
        return lambda: plan.route_and_plan(
            logits, expert, weight, vram, host, rules, place, groups, None, scratch,
            n_active=ACTIVE, scoring="softmax", normalize=True,
        )  # fmt: skip

    yield Case("route", 1, 4 * m.T * EXPERTS, route)
    yield Case("route + plan", 1, 4 * m.T * EXPERTS, both)


def other_cases(m: Maker) -> Iterator[Case]:
    wide = C * D

    def lookup() -> Callable[[], None]:
        table, out = m.weight(50000, D), m.floats(m.T, C, D)
        ids = m.ints([7919 * (t + 1) % 50000 for t in range(m.T)])
        return lambda: embed.lookup(table, ids, out)

    def block() -> Callable[[], None]:
        weights = ngram.NgramWeights(
            m.floats(wide), m.floats(wide), m.floats(wide), m.floats(4, wide), 3, EPS
        )
        key, value, residual = m.floats(m.T, wide), m.floats(m.T, D), m.floats(m.T, C, D)
        ring, scratch = m.floats(25, wide), m.floats(2, m.T, wide)
        return lambda: ngram.ngram(key, value, residual, ring, m.pos, weights, scratch)

    def gate() -> Callable[[], None]:
        y, g = m.floats(m.T, D), m.floats(m.T)
        return lambda: scale_rows(y, g)

    def choose() -> Callable[[], None]:
        logits, ids = m.floats(m.T, VOCAB), m.ints([0] * m.T)
        scratch = sample.new_scratch(m.T, VOCAB, m.device)
        return lambda: sample.argmax(logits, scratch, ids)

    yield Case("embed", 1, m.T * (2 * D + 4 * wide), lookup)
    yield Case("ngram block", 2, 4 * (m.T * (9 * wide + 2 * D) + 16 * wide), block)
    yield Case("shared gate", 1, 8 * m.T * D, gate)
    yield Case("argmax", 2, 4 * m.T * VOCAB, choose)


def all_cases(m: Maker) -> Iterator[Case]:
    """Every case of a window."""
    groups = (hyper_cases, gdn_cases, attention_cases, encoded_cases, mla_cases, plan_cases)
    for group in (*groups, other_cases):
        yield from group(m)


def copies(case: Case) -> int:
    """Copies of the inputs: more than the cache holds, 4 to 48."""
    return int(min(max(CACHE_BYTES // max(case.n_bytes, 1), 4), MOST_COPIES))


def microseconds(case: Case) -> float:
    """Median time of one call in a recorded graph."""
    calls = [case.make() for _ in range(copies(case))]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[5:])


def numbers(text: str) -> list[int]:
    """1,4 -> [1, 4]."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[1, 4])
    parser.add_argument("--context", type=numbers, default=[1024, 30000])
    parser.add_argument("--only", default="", help="part of a case's name")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this bench measures a GPU")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    print(f"{'case':<28}{'T':>3}{'context':>9}{'launches':>10}{'us':>9}{'MB':>9}{'of peak':>9}")
    for context in args.context:
        for n_tokens in args.tokens:
            for case in all_cases(Maker(torch.device("cuda"), n_tokens, context)):
                if args.only not in case.name:
                    continue
                us = microseconds(case)
                share = case.n_bytes / PEAK_BYTES / (us * 1e-6)
                print(
                    f"{case.name:<28}{n_tokens:>3}{context:>9}{case.launches:>10}{us:>9.2f}"
                    f"{case.n_bytes / 1e6:>9.2f}{share:>9.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
