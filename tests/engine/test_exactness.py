"""One row, one arithmetic, end to end: whatever the window, chunk, cache, swap, worker count or
instruction set, the same bits.

Expectations: the fixtures' logits come from transformers (max difference 1e-3 of the largest
logit); the bit-equal
checks compare the engine with itself, run as one prompt with the default settings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.oracle import FAMILIES, Reference

import strata
from strata.engine.model import Model
from strata.native import available_isas

FIXTURES = Path(__file__).parent.parent / "fixtures"
MOE = [f for f in FAMILIES if f not in ("llama", "qwen2")]
KEYS = [*((f, "bf16") for f in FAMILIES), ("gpt_oss", "mxfp4")]


def load(family: str, stem: str = "bf16", **settings: object) -> Model:
    path = FIXTURES / family / f"{stem}.gguf"
    return strata.load(path, device="cpu", context=128, **settings)


def reference(family: str, stem: str = "bf16") -> Reference:
    return Reference.load(FIXTURES / family / f"{stem}.npz")


def windows_with_rejections(model: Model, tokens: list[int], seed: int) -> np.ndarray:
    """Logits of the text read in random windows whose tail is made up and rejected; n from 0 to
    T."""
    rng = np.random.default_rng(seed)
    engine, out = model.engine, []
    engine.reset()
    while engine.length < len(tokens):
        size = int(rng.integers(1, 9))
        keep = min(int(rng.integers(0, size + 1)), len(tokens) - engine.length)
        window = tokens[engine.length : engine.length + keep]
        window += [int(t) for t in rng.integers(8, 64, size - keep)]
        out.append(engine.run_window(window)[:keep])
        engine.commit(keep)
    return np.concatenate(out)


@pytest.mark.parametrize("family, stem", KEYS)
def test_logits_equal_transformers(family: str, stem: str) -> None:
    """Quantized experts get int8 activations in float32 (numerics contract), so those are compared
    in float64."""
    ref = reference(family, stem)
    n = ref.comparable()
    with load(family, stem, dtype="float32" if stem == "bf16" else "float64") as model:
        ours = model.logits(ref.input_ids.tolist())[:n]
    assert n > 20
    assert np.abs(ours - ref.logits[:n]).max() <= 1e-3 * np.abs(ref.logits).max()
    assert (ours.argmax(-1) == ref.logits[:n].argmax(-1)).all()


@pytest.mark.parametrize("family, stem", KEYS)
def test_windows_equal_the_prompt_bit_for_bit(family: str, stem: str) -> None:
    """Windows of 1 to 8, all kept or with made-up tails rejected at random, against the text read
    as one prompt."""
    tokens = reference(family, stem).input_ids.tolist()[:44]
    with load(family, stem, prompt_chunk=32) as model:
        prompt = model.logits(tokens)
        for window in (1, 2, 4, 6, 8):
            assert np.array_equal(model.logits(tokens, through="windows", window=window), prompt)
        for seed in (0, 1):
            assert np.array_equal(windows_with_rejections(model, tokens, seed), prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers(family: str) -> None:
    """Sixteen greedy tokens, in windows of 1 and 4 with drafts, against transformers' own (where
    its margins allow)."""
    ref = reference(family)
    tokens = ref.input_ids.tolist()
    answers = []
    for spec in (1, 4):
        with load(family, spec=spec) as model:
            answer = [e.token for e in model.generate(tokens, max_tokens=16, temperature=0.0)]
            answers.append(answer)
    assert answers[0] == answers[1]
    if ref.comparable() == len(tokens):
        assert answers[0] == ref.greedy_ids.tolist()[: len(answers[0])]


@pytest.mark.parametrize("family", MOE)
def test_cache_workers_chunks_and_isa_change_no_bit(family: str) -> None:
    tokens = reference(family).input_ids.tolist()[:40]
    with load(family) as model:
        expected = model.logits(tokens)
        pairs = sum(len(a) for a in model.engine.service.tier.address_LE)
    top_k = 4
    for settings in (
        {"expert_cache": top_k, "workers": 1},
        {"expert_cache": pairs, "workers": 2, "prompt_chunk": 7},
        {"workers": 3, "cpu_isa": "portable", "prompt_chunk": 1},
        {"expert_cache": 9, "workers": 7, "cpu_isa": available_isas()[-1], "prompt_chunk": 64},
    ):
        with load(family, **settings) as model:
            assert np.array_equal(model.logits(tokens), expected), settings
            assert np.array_equal(model.logits(tokens, through="windows", window=4), expected)


@pytest.mark.parametrize("family", ["qwen4_exp", "gpt_oss"])
def test_swaps_at_window_boundaries_change_no_bit(family: str) -> None:
    """Constant eviction: room for six experts, a random swap after every window (C17)."""
    tokens = reference(family).input_ids.tolist()[:48]
    rng = np.random.default_rng(3)
    with load(family, expert_cache=6) as model:
        expected = model.logits(tokens)
        engine, tier = model.engine, model.engine.service.tier
        everyone = [(i, e) for i, a in enumerate(tier.address_LE) for e in range(len(a))]
        engine.reset()
        rows = []
        while engine.length < len(tokens):
            window = tokens[engine.length : engine.length + int(rng.integers(1, 5))]
            rows.append(engine.run_window(window))
            engine.commit(len(window))
            out = tier.resident()[int(rng.integers(6))]
            into = everyone[int(rng.integers(len(everyone)))]
            if into not in tier.resident():
                tier.evict(out)
                tier.insert(into)
        assert np.array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize("family", MOE)
def test_poisoned_buffers_change_no_bit(family: str) -> None:
    """NaN after every buffer's last declared reader: a step that reads what it did not declare
    would show."""
    tokens = reference(family).input_ids.tolist()[:24]
    with load(family) as model:
        expected = model.logits(tokens)
    with load(family, poison=True, expert_cache=5) as model:
        assert np.array_equal(model.logits(tokens), expected)
        assert np.array_equal(model.logits(tokens, through="windows", window=3), expected)


@pytest.mark.parametrize("family", ["qwen4_exp", "deepseek_v3"])
def test_float64_runs_the_references(family: str) -> None:
    """The float64 engine shares no product, attention or recurrence code with the float32 one."""
    ref = reference(family)
    tokens, n = ref.input_ids.tolist(), ref.comparable()
    with load(family, dtype="float64") as wide, load(family) as narrow:
        exact = wide.logits(tokens)
        assert np.abs(narrow.logits(tokens) - exact)[:n].max() <= 1e-4 * np.abs(exact).max()
        assert np.array_equal(wide.logits(tokens[:20], through="windows", window=4), exact[:20])
