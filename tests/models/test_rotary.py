"""Rotary frequencies against transformers' own functions, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from strata.core.errors import FormatError
from strata.models import rotary

THETA, DIMS = 150000.0, 64


def _hf(kind: str, **scaling: Any) -> tuple[tuple[float, ...], float]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=DIMS,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **scaling},
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return tuple(inv_freq.tolist()), factor


def test_plain() -> None:
    """Expectation: transformers' default formula, written out as in its model files."""
    expected = 1.0 / (THETA ** (torch.arange(0, DIMS, 2, dtype=torch.float) / DIMS))
    assert rotary.plain(THETA, DIMS).inv_freq == tuple(expected.tolist())
    assert rotary.plain(THETA, DIMS, "pairs").pairing == "pairs"


def test_linear() -> None:
    """Expectation: transformers' linear scaling."""
    assert rotary.linear(THETA, DIMS, 4.0).inv_freq == _hf("linear", factor=4.0)[0]


def test_llama3() -> None:
    """Expectation: transformers' Llama 3.1 scaling; all three ranges of wavelengths occur."""
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected, _ = _hf("llama3", original_max_position_embeddings=8192, **numbers)
    assert rotary.llama3(THETA, DIMS, 8.0, 1.0, 4.0, 8192).inv_freq == expected
    ratio = [a / b for a, b in zip(expected, rotary.plain(THETA, DIMS).inv_freq, strict=True)]
    assert ratio[0] == 1 and ratio[-1] == 0.125 and any(0.13 < r < 0.99 for r in ratio)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    "numbers",
    [
        {"factor": 32.0},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 4.0, "attention_factor": 1.5},
        {"factor": 1.0, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
)
def test_yarn(numbers: dict[str, float], truncate: bool) -> None:
    """Expectation: transformers' YaRN, frequencies and attention factor."""
    expected, factor = _hf(
        "yarn", original_max_position_embeddings=4096, truncate=truncate, **numbers
    )
    spec = rotary.yarn(THETA, DIMS, original_context=4096, truncate=truncate, **numbers)  # type: ignore[arg-type]
    assert spec.inv_freq == expected
    assert spec.attention_factor == factor


def test_factors() -> None:
    """Expectation: transformers' LongRoPE frequencies for the same factors."""
    factors = [1.0 + 0.25 * i for i in range(DIMS // 2)]
    expected, factor = _hf(
        "longrope",
        short_factor=factors,
        long_factor=factors,
        factor=4.0,
        original_max_position_embeddings=4096,
    )
    spec = rotary.from_factors(THETA, DIMS, factors, attention_factor=factor)
    assert spec.inv_freq == expected and spec.attention_factor == factor
    with pytest.raises(FormatError, match="31 rotary factors for 64 rotated dims; 32 are needed"):
        rotary.from_factors(THETA, DIMS, factors[1:])


def test_odd_number_of_dims_is_refused() -> None:
    """Expectation: a FormatError that names the number."""
    with pytest.raises(FormatError, match="got 31"):
        rotary.plain(THETA, 31)
