"""State repair: equal to a decoder with explicit states in any cut into windows; null tests.

Expectations: ``decoder.py`` (plain torch, records instead of states); the rest compares the engine
with itself.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.window.decoder import Checkpoint, Decoder, read_checkpoint

import strata
from strata.core.errors import ProgramError
from strata.engine.model import Model
from strata.window.program import Program, check
from strata.window.record import eager
from strata.window.repair import REPAIR_X
from strata.window.run import PLAIN

FIXTURES = Path(__file__).parent.parent / "fixtures"
FAMILIES = ("qwen4_exp", "qwen3_moe", "qwen3_next", "deepseek_v3")


@cache
def checkpoint(family: str) -> Checkpoint:
    """Numbers of a fixture."""
    return read_checkpoint(FIXTURES / family / "bf16.gguf", torch.float64)


def decoder_for(model: Model, family: str, repair: bool = True, own: bool = True) -> Decoder:
    """A decoder in which the same rows are late as in this engine."""
    addresses = model.engine.service.tier.address_LE
    below = model.settings.defer_cpu_below

    def late(layer: int, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        absent = torch.from_numpy(np.asarray(addresses[layer]) == 0)[expert_TK]
        if below:
            share = weight_TK / weight_TK.sum(-1, keepdim=True)
            heavy = expert_TK[share >= below]
            absent &= ~torch.isin(expert_TK, heavy)
        return absent

    ckpt = checkpoint(family)
    n_layers, ngrams = ckpt.spec.n_layers, ckpt.network.ngrams
    moe = {layer for layer, _ in ckpt.experts}
    layers = [i for i in range(n_layers - 1) if i in moe and i + 1 not in ngrams]
    return Decoder(ckpt, late, layers, repair, own)


def both(model: Model, decoder: Decoder, window: int, n_tokens: int, seed: int) -> float:
    """Windows with random acceptance and wrong drafts, and in between prompt chunks, exact windows
    and returns to a checkpoint; the largest difference of any row over the largest logit."""
    rng = random.Random(seed)
    text = [rng.randrange(8, 300) for _ in range(n_tokens)]
    engine, worst, largest = model.engine, 0.0, 0.0
    repairing, checkpoint = engine.runner.variant, None
    engine.reset()
    while (at := engine.length) < n_tokens:
        event = rng.random() if at else 1.0
        if event < 0.1:
            chunk = text[at : at + rng.randint(1, 5)]
            engine.read_prompt(chunk)
            decoder.run(chunk, exact=True)
            decoder.keep(len(chunk))
            continue
        if event < 0.2 and checkpoint is not None and len(checkpoint.tokens) < at:
            engine.restore(checkpoint)
            decoder.cut(engine.length)
            checkpoint = None
            continue
        if event < 0.4 and checkpoint is None:
            checkpoint = engine.snapshot()
        exact = event > 0.85 and at > 0
        engine.runner.variant = PLAIN if exact else repairing
        n = min(rng.randint(0, window), n_tokens - at)
        tokens = text[at : at + n] + [rng.randrange(8, 300) for _ in range(window - n)]
        ours, expected = engine.run_window(tokens), decoder.run(tokens, exact).numpy()
        worst = max(worst, float(np.abs(ours - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
        engine.commit(n)
        decoder.keep(n)
    return worst / largest


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "window"), [("float32", 1), ("float64", 4)])
def test_repair_equals_a_decoder_with_explicit_states(family: str, dtype: str, window: int) -> None:
    with strata.load(
        FIXTURES / family / "bf16.gguf", device="cpu", dtype=dtype, expert_cache=6,
        defer_cpu="repair", poison=True,
    ) as model:  # fmt: skip
        decoder = decoder_for(model, family)
        n_tokens = 24 if family == "qwen4_exp" else 14  # the indexer drops blocks from 20 on
        assert both(model, decoder, window, n_tokens, seed=window) <= 1e-5


def test_the_decoder_tells_repair_from_what_it_is_not() -> None:
    """The comparison has teeth: without repair, or with the stale write coefficients, the decoder
    is far from the engine (1e-3 and more)."""
    with strata.load(
        FIXTURES / "qwen4_exp" / "bf16.gguf", device="cpu", expert_cache=6, defer_cpu="repair"
    ) as model:
        for other in ({"repair": False}, {"own": False}):
            decoder = decoder_for(model, "qwen4_exp", **other)
            assert both(model, decoder, 2, 8, seed=3) > 1e-3


def test_rows_on_time_by_weight() -> None:
    """With a threshold only light rows are late, and only these are repaired."""
    with strata.load(
        FIXTURES / "qwen4_exp" / "bf16.gguf", device="cpu", expert_cache=6, defer_cpu="repair",
        defer_cpu_below=0.34, poison=True,
    ) as model:  # fmt: skip
        decoder = decoder_for(model, "qwen4_exp")
        assert both(model, decoder, 3, 14, seed=5) <= 1e-5


@pytest.mark.parametrize("family", ["qwen4_exp", "deepseek_v3"])
def test_with_everything_cached_the_bits_are_those_of_exact(family: str) -> None:
    path = FIXTURES / family / "bf16.gguf"
    tokens = list(range(30, 42))
    with strata.load(path, device="cpu") as model:
        exact = model.logits(tokens, through="windows", window=4)
        n_pairs = sum(len(a) for a in model.engine.service.tier.address_LE)
    with strata.load(
        path, device="cpu", expert_cache=n_pairs, defer_cpu="repair", poison=True
    ) as model:
        for window in (1, 4):
            assert np.array_equal(model.logits(tokens, through="windows", window=window), exact)


def test_only_repair_has_its_steps_and_buffers() -> None:
    path = FIXTURES / "qwen4_exp" / "bf16.gguf"
    for mode, wanted in (("0", 0), ("1", 0), ("repair", 3)):
        with strata.load(path, device="cpu", defer_cpu=mode) as model:
            window = model.engine.runner.window(2)
            names = [step.name for step in window.program.steps]
            assert names.count("repair") == names.count("correct") == wanted
            assert (REPAIR_X in window.frame.tensors()) == bool(wanted)
            assert bool(window.frame.rewritten) == bool(wanted)


def repaired_program(model: Model) -> Program:
    """The program of windows of 1."""
    program = model.engine.runner.window(1).program
    check(program)
    return program


def moved(program: Program, step_id: str, behind: str) -> Program:
    """The program with one step behind another."""
    step = program.steps[program.index(step_id)]
    rest = [s for s in program.steps if s.id != step_id]
    at = next(i for i, s in enumerate(rest) if s.id == behind)
    return program.edited([*rest[: at + 1], step, *rest[at + 1 :]])


def test_wrong_orders_are_refused_and_change_the_output() -> None:
    """A join behind the FFN read, a correction before the join, a repair before the correction, a
    repair behind the next correction, and a dropped wait: check() names each, and those that run
    to the end give other numbers."""
    with strata.load(
        FIXTURES / "qwen4_exp" / "bf16.gguf", device="cpu", defer_cpu="repair", poison=True
    ) as model:
        runner = model.engine.runner
        program = repaired_program(model)
        recorded = runner.window(1)
        right = runner.run(recorded, [9]).clone()
        faults = [
            moved(program, "late_join:2", "ffn_read:3"),
            moved(program, "correct:3", "attn_read:3"),
            moved(program, "repair:3", "attn_read:3"),
            moved(program, "repair:3", "correct:4"),
            program.edited(s for s in program.steps if s.id != "wait_late:2"),
        ]
        for fault in faults:
            with pytest.raises(ProgramError):
                check(fault)
        runs = replace(recorded, run=eager(faults[0]))
        assert not np.array_equal(runner.run(runs, [9]).numpy(), right.numpy())
