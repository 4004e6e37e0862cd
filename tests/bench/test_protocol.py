"""The speed protocol: its number, pairs and intervals by hand; arms in turns write the greedy
text."""

from __future__ import annotations

from pathlib import Path

import pytest

import strata
from strata.bench.arms import parse_arms, variant_of
from strata.bench.prompts import SHORT, long_text, monotony
from strata.bench.protocol import Decoder, Measured, Plan, Run, compare, measure_arms
from strata.bench.routing import moe_layers
from strata.engine.draft import NoDrafter, build_drafter

PATH = Path(__file__).parent.parent / "fixtures" / "qwen3_moe" / "bf16.gguf"
PROMPTS = [[3, 4, 5], [9, 8, 7, 6]]


def runs(arm: str, speeds: dict[tuple[int, int], float]) -> list[Run]:
    """Runs of 10 tokens at these speeds by (round, prompt)."""
    return [
        Run(arm, round_, prompt, 5, tokens=10, seconds=10 / speed, windows=10)
        for (round_, prompt), speed in speeds.items()
    ]


def test_the_number_is_the_median_of_the_rounds_means() -> None:
    speeds = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 10.0, (1, 1): 30.0, (2, 0): 4.0, (2, 1): 6.0}
    result = Measured(runs=runs("a", speeds))
    assert result.per_round("a") == pytest.approx([2.0, 20.0, 5.0])
    assert result.speed("a") == pytest.approx(5.0)


def test_pairs() -> None:
    """Every pair 20 % faster: no spread. Without common prompts there is no figure."""
    base = {(r, p): 1.0 + p for r in range(3) for p in range(4)}
    faster = {key: 1.2 * speed for key, speed in base.items()}
    found = compare(runs("a", base), runs("b", faster))
    assert found is not None and found.n == 12
    assert (found.gain, found.low, found.high) == pytest.approx((0.2, 0.2, 0.2))
    mixed = {key: speed * (1.0 if key[1] < 2 else 1.5) for key, speed in base.items()}
    spread = compare(runs("a", base), runs("b", mixed))
    assert spread is not None and spread.low == pytest.approx(0) and spread.high > 0.4
    assert compare(runs("a", base), runs("b", {(9, 9): 1.0})) is None


def test_arms_take_turns_and_write_the_engines_text() -> None:
    """Both arms' greedy tokens from the restored prompt equal those of a plain answer, and the
    order of the arms turns around from prompt to prompt."""
    with strata.load(PATH, device="cpu", context=64) as model:
        alone = [[e.token for e in model.generate(p, max_tokens=6, logit_bias={})] for p in PROMPTS]
        plan = Plan(PROMPTS, n_tokens=5, rounds=2)
        layers = moe_layers(model.engine.spec)
        decoder = Decoder(model.engine, plan, NoDrafter, None, layers)
        arms = {a.name: variant_of(model.engine, a) for a in parse_arms("off,check")}
        result = measure_arms(decoder, arms)
    assert [r.arm for r in result.runs[:4]] == ["off", "check", "check", "off"]
    for run in result.of("off"):
        assert list(run.text) == alone[run.prompt] and run.tokens == run.windows == 5
    assert set(result.cold) == {"off", "check"}
    k = model.engine.spec.layers[0].ffn.n_active
    used = result.usage["off"]
    assert used.hit_rate == 0.0 and sum(used.rows.values()) == used.tokens * k * len(layers)


def test_windows_with_drafts_and_of_fixed_size() -> None:
    """Drafts do not change the text; --window 4 --accept 2 gives two tokens a window."""
    with strata.load(PATH, device="cpu", context=64, spec=4) as model:
        layers = moe_layers(model.engine.spec)
        variant, texts = model.engine.runner.variant, []
        for make in (NoDrafter, lambda: build_drafter(model.settings)):
            decoder = Decoder(model.engine, Plan(PROMPTS, 12, 1), make, None, layers)
            row, state, _ = decoder.read(0)
            texts.append(decoder.write(variant, Run("a", 0, 0, 3), (row, state)).text)
        assert texts[0] == texts[1]
        fixed = Decoder(model.engine, Plan(PROMPTS, 12, 1, 4, 2), NoDrafter, None, layers)
        row, state, _ = fixed.read(0)
        run = fixed.write(variant, Run("a", 0, 0, 3), (row, state))
        assert (run.tokens, run.windows, run.accepted) == (12, 6, 6)


def test_prompts_vary() -> None:
    """Twelve different prompts; a repeated token is flagged, ordinary text is not."""
    assert len(set(SHORT)) == 12
    words = long_text(400, 0).split()
    assert len(words) >= 400 and long_text(400, 0) != long_text(400, 1)
    assert monotony([hash(w) for w in words]) is None
    assert "only 1 different" in str(monotony([7] * 100))
