"""C14: room for what comes after start, on a card of 8 GiB that is not there.

Expectations: the figures of the published shapes as the plan adds them up, and the settings' help.
"""

from __future__ import annotations

from typing import Any

import pytest

from strata.core.errors import DoesNotFitError
from strata.core.settings_load import load_settings
from strata.engine.build import plan_model
from strata.memory.budget import GIB, Line, MemoryPlan, require_reserve

MODEL = "synthetic:qwen4_exp-125b:IQ3_S"


def planned(**settings: Any) -> MemoryPlan:
    asked = load_settings({"vram_gb": 8, "ram_gb": 64, **settings}, environ={})
    return plan_model(MODEL, asked).memory


def of(plan: MemoryPlan, words: str) -> int:
    return sum(line.n_bytes for line in plan.entries if line.owner.startswith(words))


@pytest.mark.parametrize(
    "more", [{}, {"prompt_chunk": 32768}, {"context": 32768}, {"spec": 8}, {"numerics": "fast"}]
)
def test_an_automatic_cache_leaves_room_for_prompts_and_head(more: dict[str, Any]) -> None:
    plan = planned(**more)
    assert plan.fits and plan.need("vram") <= 8 * GIB
    assert of(plan, "prompt buffers") > 0 and of(plan, "state at") > 0
    assert of(plan, "fast tier") > 0, "experts get what is left, and something is"


@pytest.mark.parametrize(
    ("more", "flag", "lower"),
    [
        ({"context": 262144}, "--context", {"context": 4096}),
        (
            {"numerics": "fast", "prompt_chunk": 32768, "context": 32768},
            "--prompt-chunk",
            {"prompt_chunk": 512},
        ),
        ({"expert_cache": 20000}, "--expert-cache", {"expert_cache": 100}),
    ],
)
def test_what_cannot_be_met_names_the_setting_that_helps(
    more: dict[str, Any], flag: str, lower: dict[str, Any]
) -> None:
    plan = planned(**more)
    (line,) = plan.shortfalls()
    assert f"room is in {flag} (" in line
    assert planned(**{**more, **lower}).fits, "what was named does help"


def test_a_card_that_is_too_small_for_any_setting_says_so() -> None:
    (line,) = planned(vram_gb=2).shortfalls()
    assert "no setting helps here: " in line and "room is in" not in line


def test_a_start_needs_the_reserve_whatever_the_cache_takes() -> None:
    """Experts take what is left, so they do not count; the rest must be free."""
    lines = (
        Line("vram", "dense weights", 5 * GIB),
        Line("vram", "fast tier (900 experts)", 90 * GIB, "--expert-cache"),
        Line("vram", "state at 9 tokens of context", 2 * GIB, "--context"),
        Line("ram", "routed experts", 900 * GIB),
    )
    plan = MemoryPlan(lines, {})
    require_reserve(plan, 7 * GIB)
    with pytest.raises(DoesNotFitError, match=r"short by 1.000 GiB; room is in --context \(2.000"):
        require_reserve(plan, 6 * GIB)
