"""State repair: equal to a decoder with explicit states in any cut into windows; null tests.

Expectations: ``decoder.py`` (plain torch, records instead of states); the rest compares the engine
with itself.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.window.decoder import Checkpoint, Decoder, read_checkpoint

import strata
from strata.engine.model import Model

FIXTURES = Path(__file__).parent.parent / "fixtures"
FAMILIES = ("qwen4_exp", "qwen3_moe", "qwen3_next", "deepseek_v3")
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@cache
def checkpoint(family: str, dtype: str) -> Checkpoint:
    """Numbers of a fixture."""
    return read_checkpoint(FIXTURES / family / "bf16.gguf", DTYPES[dtype])


def decoder_for(model: Model, family: str, dtype: str, repair: bool = True) -> Decoder:
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

    ckpt = checkpoint(family, dtype)
    n_layers, ngrams = ckpt.spec.n_layers, ckpt.network.ngrams
    moe = {layer for layer, _ in ckpt.experts}
    layers = [i for i in range(n_layers - 1) if i in moe and i + 1 not in ngrams]
    return Decoder(ckpt, late, layers, repair, own=True)


def both(model: Model, decoder: Decoder, window: int, n_tokens: int, seed: int) -> float:
    """Windows with random acceptance, drafts that are wrong, a prompt chunk half way, and flushes;
    the largest difference of any row over the largest logit."""
    rng = random.Random(seed)
    text = [rng.randrange(8, 300) for _ in range(n_tokens)]
    engine, worst, largest = model.engine, 0.0, 0.0
    engine.reset()
    while (at := engine.length) < n_tokens:
        if at and rng.random() < 0.15:
            chunk = text[at : at + rng.randint(1, 6)]
            engine.read_prompt(chunk)
            decoder.run(chunk, exact=True)
            decoder.keep(len(chunk))
            continue
        if rng.random() < 0.3:
            getattr(engine, "flush", lambda: None)()
        n = min(rng.randint(0, window), n_tokens - at)
        tokens = text[at : at + n] + [rng.randrange(8, 300) for _ in range(window - n)]
        ours, expected = engine.run_window(tokens), decoder.run(tokens).numpy()
        worst = max(worst, float(np.abs(ours - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
        engine.commit(n)
        decoder.keep(n)
    return worst / largest


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 4])
def test_repair_equals_a_decoder_with_explicit_states(family: str, dtype: str, window: int) -> None:
    with strata.load(
        FIXTURES / family / "bf16.gguf", device="cpu", dtype=dtype, expert_cache=6,
        defer_cpu="repair", poison=True,
    ) as model:  # fmt: skip
        decoder = decoder_for(model, family, dtype)
        n_tokens = 30 if family == "qwen4_exp" else 16
        assert both(model, decoder, window, n_tokens, seed=window) <= 1e-5
