"""The route tail skip: by hand on small plans, and whole models against a plain layer-by-layer
computation (tests/models/plain_forward) in which the skipped rows are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import strata
from strata.core.errors import SettingError
from strata.core.types import Place
from strata.experts.tail_skip import tail_rule
from strata.kernels.plan import make_plan
from tests.models.plain_forward import forward

FIXTURES = Path(__file__).parent.parent / "fixtures"
TOKENS = [int(t) for t in np.random.default_rng(5).integers(8, 300, 22)]


@pytest.mark.parametrize(
    ("tail_rank", "skipped"), [(1, {3, 5, 1}), (2, {5, 1}), (3, set()), (9, set())]
)
def test_by_hand(tail_rank: int, skipped: set[int]) -> None:
    """Two tokens of 3 experts, 4 cached. 7: ranks 0 and 2; 3: rank 1; 5 and 1: rank 2 at best."""
    expert = np.array([7, 3, 5, 4, 7, 1], np.int32)
    expert[4:] = [3, 1]
    fast = np.zeros(8, np.int64)
    fast[4] = 4096
    plan = make_plan(0, expert, np.ones(6, np.float32), 3, fast, [tail_rule(tail_rank)])
    for e, place in zip(expert.tolist(), plan.place_R.tolist(), strict=True):
        wanted = Place.FAST if e == 4 else Place.SKIPPED if e in skipped else Place.CPU
        assert place == wanted, e


def test_one_token_that_needs_it_keeps_an_expert_for_all() -> None:
    """Expert 2 is token 0's last and token 1's first choice: computed for both."""
    expert = np.array([0, 1, 2, 2, 1, 0], np.int32)
    rules = [tail_rule(1)]
    plan = make_plan(0, expert, np.ones(6, np.float32), 3, np.zeros(3, np.int64), rules)
    places = plan.place_R.tolist()
    assert places == [Place.CPU, Place.SKIPPED, Place.CPU, Place.CPU, Place.SKIPPED, Place.CPU]


def kept_in_windows(
    window: int, tail_rank: int, resident: Callable[[int], np.ndarray]
) -> tuple[Callable[[int, torch.Tensor], torch.Tensor], list[int]]:
    """The rule once more, over whole sequences and with sets; and the count of rows left out."""
    n_out = [0]

    def kept(layer: int, expert_TK: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(expert_TK.shape, dtype=torch.bool)
        for start in range(0, len(expert_TK), window):
            rows = expert_TK[start : start + window].tolist()
            early = {e for row in rows for e in row[:tail_rank]} | set(resident(layer).tolist())
            for t, row in enumerate(rows):
                for rank, e in enumerate(row):
                    keep[start + t, rank] = e in early
        n_out[0] += int((~keep).sum())
        return keep

    return kept, n_out


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("window", [1, 4])
def test_equals_plain_recomputation(family: str, window: int) -> None:
    """float64, some experts resident: within 1e-6 of the plain computation without those rows, and
    counted; prompts are read whole."""
    path = FIXTURES / family / "bf16.gguf"
    settings = {"device": "cpu", "dtype": "float64", "expert_cache": 9, "context": 64}
    with strata.load(path, route_tail_skip=1, **settings) as model:
        ours = model.logits(TOKENS, through="windows", window=window)
        service = model.engine.service
        skipped, lines = service.counters.total(Place.SKIPPED), service.counters.lines()
        table = [np.flatnonzero(a) for a in service.tier.address_LE]
        whole = model.logits(TOKENS)
    kept, n_out = kept_in_windows(window, 1, lambda layer: table[layer])
    expected = forward(path, TOKENS, kept=kept)
    exact = forward(path, TOKENS)
    scale = np.abs(exact).max()
    assert np.abs(ours - expected).max() <= 1e-6 * scale
    assert np.abs(whole - exact).max() <= 1e-6 * scale
    assert np.abs(expected - exact).max() > 1e-3 * scale, "nothing was left out"
    assert skipped == n_out[0] > 0
    assert f"({skipped} entries) since the start" in lines[0]


def test_together_with_deferral() -> None:
    """Skipped rows are neither on time nor late; late_rule sees only what is left."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    settings = {"device": "cpu", "poison": True, "route_tail_skip": 2, "defer_cpu": "1"}
    with strata.load(path, defer_cpu_below=0.2, **settings) as model:
        logits = model.logits(TOKENS, through="windows", window=2)
        counters = model.engine.service.counters
        counts = {p: counters.total(p) for p in Place}
    assert np.isfinite(logits).all()
    assert min(counts[p] for p in (Place.SKIPPED, Place.CPU, Place.CPU_LATE)) > 0
    n_rows = len(TOKENS) * model.engine.spec.n_layers * 4
    assert sum(counts.values()) % len(TOKENS) == 0 and sum(counts.values()) <= n_rows


def test_off_is_off() -> None:
    """At its default the plan has no rule and the native planner is used; no line, no count."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu") as model:
        model.logits(TOKENS[:6], through="windows")
        assert model.engine.runner.variant.rules == ()
        assert model.engine.service.counters.lines() == []
        assert not any("TAIL_SKIP" in line for line in model.report)


def test_status_names_it_as_changing_the_output() -> None:
    """C49: off by default, and said at start."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu", route_tail_skip=2) as model:
        text = "\n".join(model.report)
    assert "STRATA_ROUTE_TAIL_SKIP=2 is ON (changes the output)" in text
    assert "route-tail-skip = 2 (argument route_tail_skip): on (changes the output)" in text


def test_nothing_to_do() -> None:
    """C44, C45: a dense model refuses it; a rank no token has, or no missed expert, says off."""
    with pytest.raises(SettingError, match="route-tail-skip: llama has no routed experts"):
        strata.load(FIXTURES / "llama" / "bf16.gguf", device="cpu", route_tail_skip=1)
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu") as model:
        n_active = model.engine.runner.network.n_active
        n_pairs = sum(len(a) for a in model.engine.service.tier.address_LE)
    for more, reason in (
        ({"route_tail_skip": n_active}, f"a token has {n_active} experts"),
        ({"route_tail_skip": 1, "expert_cache": n_pairs}, "every expert is in the fast tier"),
    ):
        with strata.load(path, device="cpu", **more) as model:
            (line,) = [x for x in model.report if x.startswith("route-tail-skip")]
            assert "off here: " in line and reason in line
            assert model.engine.runner.variant.rules == ()
