"""C50: every option of the windows in every cell of experts not, partly and all in the fast tier,
windows of 1, 2 and 4, short and long texts.

Expectations: what leaves nothing late or out gives the exact bits; ``check`` the default's sums in
another order; lossy options change the output, repair less than plain deferral over a long text.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.core.divergence import compare
from strata.core.types import Place
from strata.engine.model import Model
from strata.quality.arms import Arm, use_variant

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4_exp" / "bf16.gguf"
LONG = [int(t) for t in np.random.default_rng(2).integers(8, 300, 72)]
OPTIONS = {
    "check": {"defer_cpu": "check"},
    "all": {"defer_cpu": "1"},
    "light": {"defer_cpu": "1", "defer_cpu_below": 0.3},
    "auto": {"defer_cpu": "1", "defer_cpu_below": "auto"},
    "repair": {"defer_cpu": "repair"},
    "skip": {"route_tail_skip": 2},
}


def read(model: Model, option: str, tokens: list[int], window: int) -> np.ndarray:
    """Logits through windows that run by an option."""
    arm = Arm(option, OPTIONS.get(option, {}))
    use_variant(model.engine, arm.settings(model.settings), window)
    return np.asarray(model.logits(tokens, through="windows", window=window))


@pytest.mark.parametrize("resident", ["none", "some", "all"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_c50_cell(resident: str, window: int) -> None:
    with strata.load(FIXTURE, device="cpu") as model:
        n_pairs = sum(len(a) for a in model.engine.service.tier.address_LE)
    n_slots = {"none": 0, "some": n_pairs // 4, "all": n_pairs}[resident]
    with strata.load(FIXTURE, device="cpu", workers=1, context=96, expert_cache=n_slots) as model:
        counters = model.engine.service.counters
        for tokens in (LONG[:7], LONG) if window == 4 else (LONG[:15],):
            exact = read(model, "off", tokens, window)
            error = {}
            for option in OPTIONS:
                before = {p: counters.total(p) for p in Place}
                rows = read(model, option, tokens, window)
                moved = {p: counters.total(p) - before[p] for p in Place}
                assert np.isfinite(rows).all()
                error[option] = float(compare(exact, rows).kl_top.mean())
                changed = moved[Place.CPU_LATE] + moved[Place.SKIPPED]
                if resident == "all":
                    assert moved[Place.FAST] > 0 and changed == 0
                if not changed:
                    assert np.array_equal(rows, exact), option
                elif option == "check":
                    assert np.abs(rows - exact).max() <= 1e-4 * np.abs(exact).max()
                else:
                    assert 0 < error[option] < math.inf, option
            if resident != "all":
                assert error["check"] < 1e-6 < min(error[o] for o in ("light", "all", "skip"))
            if resident != "all" and len(tokens) > 50:
                assert max(error["repair"], error["light"]) < error["all"]
