"""Prompts of a model on a GPU: tokens a second beside the link's limit, fast and exact.

    python bench/gpu_prompt.py synthetic:qwen4_exp-125b:IQ3_S --case 0:512,0.1:4096 --json FILE

The model is loaded once. A case is a share of all experts in VRAM and a number of tokens; --chunk
tokens go through a layer at a time; --settings '{"prompt_cpu": 0.4}' fixes the CPU's share. The
limit: bytes of the experts that are not in VRAM, once a chunk, at the speed of the link measured
here; in the file's types, and as the experts lie in RAM. With a share for the CPU it can be passed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import strata
from strata.bench.machine import VramPeak, measure_bandwidths
from strata.bench.sweep import Phases, Slots
from strata.bench.traffic import traffic_of
from strata.engine.checkpoint_plan import understand
from strata.engine.engine import Engine
from strata.engine.machine import probe
from strata.models.synthetic import cut_down, open_model
from strata.window.device_chunk import ChunkReader
from strata.window.device_fast import FastReader, can_read

BUDGET_S, MOST_RUNS = 9.0, 5
"""Of one case and mode, after its first run."""


def main() -> None:
    """Load once, read prompts, print and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="synthetic:qwen4_exp-125b:IQ3_S")
    parser.add_argument("--case", default="0:512,0.1:4096", help="SHARE:TOKENS, with commas")
    parser.add_argument("--numerics", default="fast,exact")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--settings", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--json")
    args = parser.parse_args()
    cases = [(float(a), int(b)) for a, b in (c.split(":") for c in args.case.split(","))]
    context = max(n for _, n in cases) + 64
    settings = {"device": args.device, "context": context, "prompt_chunk": args.chunk}
    settings |= {"expert_cache": 0} | json.loads(args.settings)
    if what := cut_down(args.model):
        print(f"NOT THE WHOLE MODEL: {what}", flush=True)
    link = measure_bandwidths(probe().cpu_cores, args.device).link or 1.0
    checkpoint = open_model(args.model)
    file_bytes = traffic_of(understand(checkpoint)).all_expert_bytes
    checkpoint.close()
    phases = Phases()
    model = strata.load(args.model, progress=phases, **settings)
    phases.end()
    print(phases.line(), f"link {link / 1e9:.1f} GB/s", sep="\n", flush=True)
    bench = Prompts(model.engine, file_bytes, link)
    rows = []
    for share, n_tokens in cases:
        bench.cache(share)
        for numerics in args.numerics.split(","):
            row = {"model": args.model, **bench.measure(numerics, n_tokens, args.chunk)}
            print(json.dumps({k: v for k, v in row.items() if k != "runs_s"}), flush=True)
            print(line(row), flush=True)
            rows.append(row | {"load_s": phases.seconds, "cut_down": what, "settings": settings})
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    model.close()


def line(row: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{row['tokens']} tokens, {row['cache']:.0%} of the experts in VRAM, {row['numerics']}: "
        f"{row['tok_s']:.0f} tok/s, {row['s']:.3f} s (the first {row['first_s']:.1f} s); the link "
        f"alone {row['limit_s']:.3f} s: {row['limit_share']:.1%} of its limit, "
        f"{row['cpu_share']:.0%} of the missed experts not copied"
        f" ({row['limit_share_laid_out']:.1%} for the bytes as they lie in RAM)"
    )


class Prompts:
    """Prompts of one engine, with the cache and the arithmetic that are asked for."""

    def __init__(self, engine: Engine, file_bytes: int, link: float) -> None:
        self.engine, self._link = engine, link
        self._tier, runner = engine.service.tier, engine.runner
        self._slots = Slots(engine)
        self._n_pairs = sum(len(addresses) for addresses in self._tier.address_LE)
        self._per_file_byte = self._tier.store.n_bytes / file_bytes
        # both stream through the same two buffers
        self._experts = runner._reader.experts
        parts = (runner.network, runner.state, self._experts)
        self._readers = {"exact": ChunkReader(*parts)}
        if can_read(runner.network):
            self._readers["fast"] = FastReader(*parts)
        self._first: dict[int, np.ndarray] = {}

    def cache(self, share: float) -> None:
        """So much of all experts in VRAM."""
        self._slots.resize(round(share * self._n_pairs))

    def measure(self, numerics: str, n_tokens: int, chunk: int) -> dict[str, Any]:
        """The median of some runs, and what they say."""
        engine, tier = self.engine, self._tier
        engine.runner._reader = self._readers[numerics]
        device = engine.runner.network.device.type
        tokens = np.random.default_rng(0).integers(0, engine.n_vocab, n_tokens).tolist()
        times: list[float] = []
        with VramPeak(device) as vram:
            while len(times) < 2 or (len(times) <= MOST_RUNS and sum(times[1:]) < BUDGET_S):
                engine.reset()
                began = time.perf_counter()
                logits = engine.read_prompt(tokens)
                times.append(time.perf_counter() - began)
        missing = sum(
            int((tier.address_LE[i] == 0).sum()) * layer.stride_bytes
            for i, layer in enumerate(tier.store.layers) if layer is not None
        )  # fmt: skip
        laid_out = missing * -(-n_tokens // chunk) / self._link
        seconds = statistics.median(times[1:])
        return {
            "tokens": n_tokens, "chunk": chunk, "numerics": numerics,
            "cache": tier.n_slots / max(1, self._n_pairs), "s": seconds,
            "tok_s": n_tokens / seconds, "first_s": times[0], "runs_s": times,
            "link_gb_s": self._link / 1e9, "limit_s": laid_out / self._per_file_byte,
            "limit_share": laid_out / self._per_file_byte / seconds,
            "limit_share_laid_out": laid_out / seconds, "vram_peak_bytes": vram.n_bytes,
            "vram_peak_by": vram.source, "cpu_share": self._experts.cpu_share,
            **self._beside_exact(n_tokens, logits),
        }  # fmt: skip

    def _beside_exact(self, n_tokens: int, logits: np.ndarray) -> dict[str, float]:
        """How far the logits lie from those of the mode that read this prompt first."""
        first = self._first.setdefault(n_tokens, logits)
        apart = float(np.abs(first - logits).max() / np.abs(first).max())
        return {"logits_apart": apart, "same_choice": int(first.argmax() == logits.argmax())}


if __name__ == "__main__":
    main()
