"""The pieces of latent attention against keys and values written out per head, in float64."""

from __future__ import annotations

import torch

from strata.kernels.attention import attention
from strata.kernels.mla import absorbed, append_rows, expanded
from strata.kernels.rms_norm import rms_norm
from strata.kernels.rotary import rotary
from strata.models.spec import RotarySpec

T, H, C, R, P, V, START = 3, 4, 16, 8, 12, 10, 5
SPEC = RotarySpec(tuple(0.5**i for i in range(R // 2)), "pairs")


def test_absorbed_form_is_attention_over_expanded_heads() -> None:
    """Expectation: plain attention with key [k_b latent | k_rope] and value v_b latent."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n = START + T
    rows, q, norm = rand(n, C + R), rand(T, H, P + R), rand(C)
    k_b, v_b = rand(H, P, C), rand(H, V, C)
    cache = torch.full((n + 2, C + R), float("nan"), dtype=torch.float64)
    append_rows(rows[:START], norm, 1e-6, 0, SPEC, cache)
    append_rows(rows[START:], norm, 1e-6, START, SPEC, cache)
    cache = cache[:n].unsqueeze(1)
    mixed = attention(absorbed(q, k_b, START, SPEC), cache, cache[..., :C], START, 0.3)
    got = expanded(mixed, v_b)

    latent = rms_norm(rows[:, :C], norm, 1e-6)
    rope = rotary(rows[:, None, C:], torch.arange(n), SPEC).expand(n, H, R)
    key = torch.cat([torch.einsum("hpc,nc->nhp", k_b, latent), rope], dim=2)
    value = torch.einsum("hvc,nc->nhv", v_b, latent)
    query = torch.cat([q[..., :P], rotary(q[..., P:], torch.arange(START, n), SPEC)], dim=2)
    torch.testing.assert_close(got, attention(query, key, value, START, 0.3))
