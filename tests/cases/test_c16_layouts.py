"""C16 end to end in every layout: instruction sets and worker counts change no bit, wherever the
experts lie.

Expectations: float64 arithmetic for the first setting (as close as 8-bit activations allow), and
the bits of the first setting for all others.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.native import available_isas
from tests.cases.kit import load

FIXTURES = Path(__file__).parents[1] / "fixtures"
IDS = [5, 80, 9, 9, 200, 31, 77, 4, 250, 12]
LAYOUTS: dict[str, dict[str, Any]] = {
    "native": {"expert_layout": "native"},
    "tiles": {"expert_layout": "tiles"},
    "on disk": {"experts_on_disk": True},
    "on disk, cached": {"experts_on_disk": True, "expert_cache": 5},
    "tiles, cached": {"expert_layout": "tiles", "expert_cache": 5},
}


@cache
def first(family: str) -> np.ndarray:
    """Portable kernels, one worker, the file's own rows."""
    with load(model_of(family), cpu_isa="portable", expert_layout="native") as model:
        return model.logits(ids_of(model.engine.n_vocab))


def model_of(family: str) -> Path:
    return FIXTURES / family / ("mxfp4.gguf" if family == "gpt_oss" else "q8_0.gguf")


def ids_of(n_vocab: int) -> list[int]:
    return [i % n_vocab for i in IDS]


# every instruction set and worker count once, not every pair: loading takes most of the time
PAIRS = list(zip((1, 3, 7), islice(cycle(reversed(available_isas())), 3), strict=True))
CHOSEN = [("qwen3_moe", how) for how in LAYOUTS] + [
    ("gpt_oss", how) for how in ("native", "tiles", "on disk, cached")
]


@pytest.mark.parametrize(("workers", "isa"), PAIRS)
@pytest.mark.parametrize(("family", "how"), CHOSEN)
def test_c16_every_layout(family: str, how: str, workers: int, isa: str) -> None:
    """Expert widths of 32 rows, which neither 3 nor 7 divides; gpt-oss has biases. As a prompt and
    in windows."""
    with load(model_of(family), cpu_isa=isa, workers=workers, **LAYOUTS[how]) as model:
        ids = ids_of(model.engine.n_vocab)
        assert np.array_equal(model.logits(ids), first(family))
        windows = model.logits(ids, through="windows", window=4)
    assert np.array_equal(windows, first(family))


def test_the_first_setting_is_right() -> None:
    """qwen3_moe in Q8_0 against the same model of the fixture in float64 arithmetic."""
    with load(model_of("qwen3_moe"), dtype="float64") as model:
        exact = model.logits(ids_of(model.engine.n_vocab))
    error = np.abs(first("qwen3_moe") - exact).max() / np.abs(exact).max()
    assert error < 0.03
