"""Prompts of a model on a GPU: tokens a second by length and by share of experts in VRAM.

    python bench/gpu_prompt.py synthetic:qwen4_exp-125b:IQ3_S --cache 0.1,0 --tokens 512,4096

The limit beside it: bytes of the experts that are not cached, once a chunk, at the link's speed.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

import strata
from strata.experts.fast_tier import even_profile


def link_speed() -> float:
    """Bytes a second from page-locked memory, best of five copies of 256 MiB."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, len(host) / (time.perf_counter() - began))
    return best


def main() -> None:
    """Load once, read prompts, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cache", default="0")
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--out")
    args = parser.parse_args()
    settings = {"device": "cuda", "context": 8192} | json.loads(args.settings)
    link = link_speed()
    model = strata.load(args.model, **settings)
    engine = model.engine
    tier = engine.service.tier
    pairs = even_profile([len(a) for a in tier.address_LE])
    total = model.engine.plan.need("ram")
    rng = np.random.default_rng(0)
    results = []
    for share in (float(c) for c in args.cache.split(",")):
        tier.impose(pairs[: round(share * len(pairs))])
        for n in (int(t) for t in args.tokens.split(",")):
            times = []
            for _ in range(3):
                engine.reset()
                tokens = [int(t) for t in rng.integers(0, engine.n_vocab, n)]
                began = time.perf_counter()
                engine.read_prompt(tokens)
                times.append(time.perf_counter() - began)
            row = {
                "cache": share, "tokens": n, "s": sorted(times)[1], "tok_s": n / sorted(times)[1],
                "link_gb_s": link / 1e9, "ram_gib": total / 2**30, "first_s": times[0],
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            results.append(row)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    model.close()


if __name__ == "__main__":
    main()
