"""Rotary frequencies: from what a config or GGUF file says to a RotarySpec. Knows no files.

The frequencies are the float32 numbers that the models were trained with (transformers' formulas,
operation by operation); the op multiplies them by positions in float64.
n_dims: rotated dims of a head (head_dim times the partial rotary factor), an even number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from strata.core.errors import FormatError
from strata.models.spec import RotarySpec

Pairing = Literal["half", "pairs"]


def _wavelength_base(theta: float, n_dims: int) -> torch.Tensor:
    """theta^(2i / n_dims) in float32, [n_dims / 2]."""
    if n_dims <= 0 or n_dims % 2:
        raise FormatError(
            f"rotary needs an even, positive number of dims per head, got {n_dims}; "
            f"check head_dim and partial_rotary_factor"
        )
    if not 0 < theta < math.inf:
        raise FormatError(f"the base of the rotary frequencies is {theta}; a number above 0 is due")
    base: torch.Tensor = theta ** (torch.arange(0, n_dims, 2, dtype=torch.float32) / n_dims)
    return base


def _spec(inv_freq: torch.Tensor, pairing: Pairing, attention_factor: float = 1.0) -> RotarySpec:
    return RotarySpec(tuple(inv_freq.tolist()), pairing, attention_factor)


def plain(theta: float, n_dims: int, pairing: Pairing = "half") -> RotarySpec:
    """inv_freq[i] = theta^(-2i / n_dims), no scaling."""
    return _spec(1.0 / _wavelength_base(theta, n_dims), pairing)


def linear(theta: float, n_dims: int, factor: float, pairing: Pairing = "half") -> RotarySpec:
    """Positions divided by ``factor``."""
    return _spec(1.0 / _wavelength_base(theta, n_dims) / factor, pairing)


def from_factors(
    theta: float,
    n_dims: int,
    factors: Sequence[float],
    pairing: Pairing = "half",
    attention_factor: float = 1.0,
) -> RotarySpec:
    """Each frequency divided by its own factor (GGUF rope_freqs.weight, LongRoPE)."""
    if len(factors) != n_dims // 2:
        raise FormatError(
            f"{len(factors)} rotary factors for {n_dims} rotated dims; {n_dims // 2} are needed"
        )
    scaled = torch.tensor(factors, dtype=torch.float32) * _wavelength_base(theta, n_dims)
    return _spec(1.0 / scaled, pairing, attention_factor)


def llama3(
    theta: float,
    n_dims: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
    pairing: Pairing = "half",
) -> RotarySpec:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between."""
    inv_freq = 1.0 / _wavelength_base(theta, n_dims)
    wavelength = 2 * math.pi / inv_freq
    longest = original_context / low_freq_factor
    shortest = original_context / high_freq_factor
    scaled = torch.where(wavelength > longest, inv_freq / factor, inv_freq)
    span = high_freq_factor - low_freq_factor
    keep = (original_context / wavelength - low_freq_factor) / span
    ramp = (1 - keep) * scaled / factor + keep * scaled
    between = (wavelength >= shortest) & (wavelength <= longest)
    return _spec(torch.where(between, ramp, scaled), pairing)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's 0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What cos and sin are multiplied by when the config names no attention factor."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def yarn(
    theta: float,
    n_dims: int,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool = True,
    pairing: Pairing = "half",
) -> RotarySpec:
    """YaRN (arXiv 2309.00071): fast dims keep their frequency, slow ones are divided by ``factor``.

    beta_fast, beta_slow: turns over original_context at the two ends of the ramp between them.
    truncate: round the ramp's ends outwards to whole dims (gpt-oss: False).
    attention_factor None: worked out from factor and the mscales.
    """

    if theta <= 1 or not 0 < beta_slow < beta_fast:
        raise FormatError(
            f"YaRN needs a base above 1 and 0 < beta_slow < beta_fast, got base {theta}, beta_slow "
            f"{beta_slow} and beta_fast {beta_fast}; check the rope settings"
        )

    def dim_of(turns: float) -> float:
        log_turns = math.log(original_context / (turns * 2 * math.pi))
        return n_dims * log_turns / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n_dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(n_dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = _wavelength_base(theta, n_dims)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * base) * (1 - keep) + 1.0 / base * keep
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return _spec(inv_freq, pairing, attention_factor)
