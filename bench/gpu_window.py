"""Windows of a model on a GPU: time of a window by size, beside the bytes it reads.

    python bench/gpu_window.py synthetic:qwen4_exp-125b:IQ3_S:layers=8 --cache 0,0.25,-1 --window 1,4
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


def main() -> None:
    """Load once per cache size, run windows, print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cache", default="-1")
    parser.add_argument("--window", default="1")
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--pcie", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    results = []
    for cache in (float(c) for c in args.cache.split(",")):
        started = time.time()
        slots = int(cache)
        if 0 < cache < 1:
            with strata.load(args.model, context=64, expert_cache=0) as probe:
                slots = int(cache * sum(len(a) for a in probe.engine.service.tier.address_LE))
        model = strata.load(
            args.model, device="cuda", context=args.context, expert_cache=slots,
            pcie_frac=args.pcie, workers=args.workers, seed=1,
        )  # fmt: skip
        engine = model.engine
        print(f"loaded in {time.time() - started:.1f} s", *model.report[-3:], sep="\n  ", flush=True)
        rng = np.random.default_rng(0)
        for size in (int(w) for w in args.window.split(",")):
            started = time.time()
            engine.reset()
            engine.runner.window(size)
            print(f"window {size}: recorded in {time.time() - started:.1f} s", flush=True)
            times = []
            for _ in range(args.n):
                tokens = [int(t) for t in rng.integers(0, engine.n_vocab, size)]
                began = time.perf_counter()
                engine.run_window(tokens)
                engine.commit(size)
                times.append(time.perf_counter() - began)
            warm = times[len(times) // 4 :]
            counts = engine.service.counters
            total = sum(counts.total(p) for p in Place) or 1
            shares = {p.name: round(counts.total(p) / total, 3) for p in Place if counts.total(p)}
            row = {
                "cache": slots, "window": size, "median_ms": 1e3 * statistics.median(warm),
                "best_ms": 1e3 * min(warm), "tok_s": size / statistics.median(warm),
                "rows": shares, "vram": torch.cuda.max_memory_allocated(),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            results.append(row)
        model.close()
        del model, engine
        torch.cuda.empty_cache()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
