"""Windows of a model on a GPU: time of a window by size and by share of experts in VRAM.

    python bench/gpu_window.py synthetic:qwen4_exp-125b:IQ3_S --cache 1,0.5,0.1,0 --window 1,4

The model is loaded once with room for every expert; a smaller cache is imposed on the same engine.
Tokens are random. Times are medians over the windows after the first third.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

import strata
from strata.core.types import Place
from strata.experts.fast_tier import even_profile


def main() -> None:
    """Load once, run every cache size and window size, print and keep the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cache", default="1", help="shares of all experts in VRAM")
    parser.add_argument("--window", default="1")
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--host-n", type=int, default=240)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--settings", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--out")
    args = parser.parse_args()
    started = time.time()
    settings = {"device": "cuda", "context": args.context} | json.loads(args.settings)
    model = strata.load(args.model, **settings)
    engine = model.engine
    print(f"loaded in {time.time() - started:.1f} s", *model.report[-5:], sep="\n  ", flush=True)
    tier = engine.service.tier
    pairs = even_profile([len(a) for a in tier.address_LE])
    results = []
    for share in (float(c) for c in args.cache.split(",")):
        tier.impose(pairs[: round(share * len(pairs))])
        for size in (int(w) for w in args.window.split(",")):
            row = measure(engine, size, args.n if share == 1 else args.host_n)
            row = {"model": args.model, "cache": share, **row, "settings": settings}
            print(json.dumps(row), flush=True)
            results.append(row)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    model.close()


def measure(engine: object, size: int, n: int) -> dict[str, object]:
    """Median ms of n windows of ``size`` random tokens, and where their rows were computed."""
    rng = np.random.default_rng(0)
    engine.reset()
    started = time.time()
    engine.runner.window(size)
    recorded = time.time() - started
    counters = engine.service.counters
    times = []
    for i in range(n):
        if engine.length + 2 * size > engine.context_tokens:
            engine.reset()
        if i == n // 3:
            before = {p: counters.total(p) for p in Place}
        tokens = [int(t) for t in rng.integers(0, engine.n_vocab, size)]
        began = time.perf_counter()
        engine.verify(tokens)
        engine.commit(size)
        times.append(time.perf_counter() - began)
    warm = times[n // 3 :]
    rows = {p.name: counters.total(p) - before[p] for p in Place}
    total = sum(rows.values()) or 1
    share = getattr(engine.runner, "share", None)
    return {
        "window": size,
        "median_ms": round(1e3 * statistics.median(warm), 3),
        "p10_ms": round(1e3 * sorted(warm)[len(warm) // 10], 3),
        "tok_s": round(size / statistics.median(warm), 1),
        "rows": {name: round(k / total, 3) for name, k in rows.items() if k},
        "pcie_256ths": share.share(size) if share else None,
        "recorded_s": round(recorded, 1),
        "vram_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


if __name__ == "__main__":
    main()
