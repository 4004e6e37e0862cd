"""The adaptive cache: which experts are exchanged (Strata's rules, by hand), that logits stay the
same bits, that hits rise, and that what was learned comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strata
from strata.core.errors import SettingError
from strata.experts.adapt import AdaptCounts, HeldByPolicy, UseCounts
from strata.experts.fast_tier import read_profile
from strata.experts.policy import POLICIES

PATH = Path(__file__).parent.parent / "fixtures" / "qwen3_moe" / "bf16.gguf"
TOKENS = [int(t) for t in np.random.default_rng(3).integers(8, 64, 60)]


ZERO = np.zeros(1, np.int32)


def held(*experts: int, n: int = 6) -> np.ndarray:
    found = np.zeros(n, np.bool_)
    found[list(experts)] = True
    return found


def test_counts_exchange_by_use_and_margin() -> None:
    """Held 0 (1 use) and 1 (5); outside 2 (3 uses), 3 (2) and 4 (1). 2 comes for 0: 3 >= 1 + 1.5.
    3 would come for 1, but 2 < 5 + 1.5; 4 has fewer than two uses. After a round all count 0.7."""
    counts = UseCounts([6], 0.7)
    rows = np.array([0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4], np.int32)
    counts.observe(np.zeros_like(rows), rows)
    (swap,) = counts.swaps([held(0, 1)])
    assert (swap.layer, swap.goes, swap.comes, swap.gain) == (0, 0, 2, 2.0)
    counts.end_round()
    # 2.1 against 0.7: less than the margin by now
    assert counts.swaps([held(0, 1)]) == []
    counts.observe(ZERO, np.array([2], np.int32))
    assert counts.swaps([held(0, 1)])[0].gain == pytest.approx(2.4)


def test_layers_are_kept_apart() -> None:
    """The same number in layers 0 and 2 (layer 1 has no experts): only the used one comes."""
    counts = UseCounts([4, 0, 6], 0.7)
    counts.observe(np.array([2, 2, 2], np.int32), np.array([3, 3, 3], np.int32))
    none = np.zeros(0, np.bool_)
    (swap,) = counts.swaps([held(0, n=4), none, held(0)])
    assert (swap.layer, swap.goes, swap.comes) == (2, 0, 3)


def test_policies_say_what_should_be_held() -> None:
    """LRU of 2 slots, told 4 then 5: both come, what was there goes."""
    ranking = HeldByPolicy("lru", [[0, 1]])
    ranking.observe(np.array([0, 0], np.int32), np.array([4, 5], np.int32))
    assert {(s.goes, s.comes) for s in ranking.swaps([held(0, 1)])} == {(0, 4), (1, 5)}


def run(**settings: object) -> tuple[np.ndarray, AdaptCounts | None]:
    with strata.load(PATH, device="cpu", context=128, **settings) as model:
        logits = model.logits(TOKENS, through="windows", window=2)
        adapter = model.engine.adapter
        return logits, None if adapter is None else adapter.counts


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_stay_and_experts_move(policy: str) -> None:
    """60 tokens in windows of 2 with a third of the experts cached: the same bits as without a
    cache, and experts were exchanged."""
    plain, none = run()
    assert none is None
    logits, counts = run(expert_cache=8, adapt_swaps=3, adapt_every=2, adapt_policy=policy)
    assert np.array_equal(logits, plain)
    assert counts is not None and counts.swaps > 0 and counts.windows == 30
    assert 0 < counts.hits < counts.rows
    assert "rows found their expert" in counts.line()


def test_use_of_few_experts_ends_in_the_cache() -> None:
    """A text of one token routes alike again and again: the last windows hit nearly always, which
    a fixed cache of the first experts does not."""
    with strata.load(
        PATH, device="cpu", context=128, expert_cache=8, adapt_swaps=8, adapt_every=1
    ) as model:
        engine = model.engine
        rates = []
        for _ in range(2):
            before = (engine.adapter.counts.hits, engine.adapter.counts.rows)
            for _ in range(20):
                engine.run_window([9])
                engine.commit(1)
            after = (engine.adapter.counts.hits, engine.adapter.counts.rows)
            rates.append((after[0] - before[0]) / (after[1] - before[1]))
        assert rates[1] > 0.6 and rates[1] > rates[0]
        n = len(engine.service.tier.resident())
        assert n == 8, "as many experts as slots, whatever was exchanged"


def test_what_was_learned_comes_back(tmp_path: Path) -> None:
    """The profile written at the end ranks by use, and the next start holds its first experts."""
    path = tmp_path / "profile.txt"
    with strata.load(PATH, device="cpu", context=128, expert_profile_save=path) as model:
        model.logits(TOKENS[:20], through="windows", window=1)
        adapter = model.engine.adapter
        n_experts = [layer.ffn.n_experts for layer in model.engine.spec.layers]
    pairs = read_profile(path, n_experts)
    uses = [adapter.uses_of(pair) for pair in pairs]
    assert uses == sorted(uses, reverse=True) and len(pairs) == sum(n_experts) and uses[0] > 0
    with strata.load(PATH, device="cpu", context=64, expert_profile=path, expert_cache=5) as model:
        assert model.engine.service.tier.resident() == sorted(pairs[:5])


def test_nothing_to_exchange_is_told() -> None:
    with strata.load(PATH, device="cpu", context=64, adapt_swaps=4) as model:
        (line,) = [x for x in model.report if x.startswith("adapt-swaps")]
        assert line.endswith("off here: the expert cache has no slot")
    with pytest.raises(SettingError, match="--adapt-policy needs --adapt-swaps"):
        strata.load(PATH, device="cpu", adapt_policy="lru")
    with pytest.raises(SettingError, match="--adapt-decay belongs to --adapt-policy decayed"):
        strata.load(PATH, device="cpu", adapt_swaps=1, adapt_policy="lru", adapt_decay=0.5)
