"""What handing a layer's rows to the CPU costs by itself, in microseconds a layer.

    python bench/handoff.py --json FILE

Windows of a model whose experts all lie in RAM, with no PCIe share. Their rings are answered by the
native loop and the real pool, with an expert so small (32 numbers wide) that the workers return at
once; from their time that of other windows is taken, in turns:
    handoff   the same graph without rings and waits
    whole     also without the payload that the plan writes for the CPU
Bar: handoff <= 10 us a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import strata
from strata.bench.arms import with_steps
from strata.core.types import Place
from strata.experts.store import ExpertLayer
from strata.kernels.expert_rows import ExpertShape, layout
from strata.native import CpuPool
from strata.window.program import Program, Step

MODEL = "synthetic:qwen4_exp-125b:IQ3_S:layers=12:experts=32:vocab=4096"
WITHOUT = ("handoff", "whole")
TURN = 20


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--window", default="1,4")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    model = strata.load(
        args.model, device="cuda", context=512, expert_cache=0, pcie_frac=0.0, workers=args.workers
    )
    handoff = Handoff(model.engine)
    rows = []
    for size in (int(w) for w in args.window.split(",")):
        row = {"model": args.model, "workers": model.settings.workers}
        row |= handoff.measure(size, args.turns)
        print(json.dumps(row), flush=True)
        print(
            f"windows of {size}: hand-off {row['handoff_us']:.2f} us a layer (bar 10), with the"
            f" payload {row['whole_us']:.2f}; the CPU answered {row['answered']:.0%} of the rows"
        )
        rows.append(row)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    handoff.close()
    model.close()


@dataclass(frozen=True)
class IdleStore:
    """Every expert of every layer is the same one of 32 x 32 weights, all zero."""

    layers: tuple[ExpertLayer | None, ...]


def idle_store(n_experts_L: list[int]) -> IdleStore:
    """Of a model with so many experts a layer (0: a dense one).

    Floats: of codes a worker would decode 32 rows first, 2 us that are not the hand-off's.
    """
    shape: ExpertShape = layout(32, 32, ("F32", "F32", "F32"))
    # a stride of 0: one blob for all
    blob = torch.zeros((1, -(-shape.blob_bytes // 256) * 256), dtype=torch.uint8)
    return IdleStore(
        tuple(ExpertLayer(shape, 0, blob.expand(n, -1)) if n else None for n in n_experts_L)
    )


class Handoff:
    """Windows of one engine, answered at once."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._usual = engine, engine.runner.variant
        service = engine.service
        self._n_experts = [len(addresses) for addresses in service.tier.address_LE]
        self._store = idle_store(self._n_experts)
        self._pool = CpuPool(workers=engine.settings.workers, spin_us=400)
        if engine.runner.network.device.type == "cuda":
            service.serve_natively(self._pool, self._store)

    def close(self) -> None:
        """End the workers."""
        self._engine.runner.variant = self._usual
        self._pool.close()

    def measure(self, size: int, turns: int) -> dict[str, Any]:
        """Medians over turns of the differences, per layer with experts."""
        variants = {"full": with_steps(self._usual, "handed over")}
        runner = self._engine.runner
        plans = {"handoff": None, "whole": _Plans(runner.network, runner.service)}
        for name in WITHOUT:
            without = with_steps(self._usual, f"without {name}", _Without(plans[name]))
            variants[name] = replace(without, rings_apart=True)
        layers = sum(n > 0 for n in self._n_experts)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for name in variants:
            self._turn(variants[name], size)
        for _ in range(turns):
            for name, variant in variants.items():
                times[name].append(statistics.median(self._turn(variant, size)))
        rows = self._engine.service.counters.rows
        apart = {
            name: [1e6 * (a - b) / layers for a, b in zip(times["full"], times[name], strict=True)]
            for name in WITHOUT
        }
        return {
            "window": size, "layers": layers, "turns": turns, "windows_a_turn": TURN,
            **{f"{name}_us": statistics.median(found) for name, found in apart.items()},
            **{f"{name}_us_turns": found for name, found in apart.items()},
            **{f"{name}_window_ms": 1e3 * statistics.median(t) for name, t in times.items()},
            # every row is the CPU's, or the figure is of something else
            "answered": float(rows[:, Place.CPU].sum() / max(1, rows.sum())),
        }  # fmt: skip

    def _turn(self, variant: Any, size: int) -> list[float]:
        engine = self._engine
        engine.runner.variant = variant
        found = []
        rng = np.random.default_rng(0)
        for _ in range(TURN):
            if engine.length + 2 * size > engine.context_tokens:
                engine.reset()
            tokens = [int(t) for t in rng.integers(0, engine.n_vocab, size)]
            began = time.perf_counter()
            engine.verify(tokens)
            found.append(time.perf_counter() - began)
            engine.commit(size)
        return found


@dataclass(frozen=True)
class _Plans:
    """Plans that write nothing for the host."""

    network: Any
    service: Any

    def of(self, layer: int, frame: Any) -> Callable[[], None]:
        """The launch of a layer's."""
        ffn = self.network.ffns[layer]
        return lambda: self.service.plan(layer, frame.T, ffn.logits(frame), ffn.rule())


@dataclass(frozen=True)
class _Without:
    """Rings and waits launch nothing; plans: instead of the window's own."""

    plans: _Plans | None

    def __call__(self, program: Program, frame: object) -> Program:
        """The program, whose list of steps stays."""
        known = {step.name for step in program.steps}
        # what was joined with another step cannot be left out alone
        gone = {"ring", "wait_cpu", "plan"} - known
        assert not gone, f"the window has no step {', '.join(gone)}: {sorted(known)}"
        return program.edited(self._changed(step, frame) for step in program.steps)

    def _changed(self, step: Step, frame: object) -> Step:
        if step.name in ("ring", "wait_cpu"):
            return replace(step, launch=_nothing)
        if step.name == "plan" and self.plans is not None:
            return replace(step, launch=self.plans.of(step.layer, frame))
        return step


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
