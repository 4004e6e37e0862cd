"""Latent attention's pieces in plain torch; letters and formulas: the package docstring."""

from __future__ import annotations

import torch

from strata.kernels.rms_norm import rms_norm
from strata.kernels.rotary import RotaryLike, rotary


def _positions(start: int, x: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, start + len(x), device=x.device)


def append_rows(
    row_TN: torch.Tensor,
    norm_c: torch.Tensor,
    eps: float,
    start: int,
    spec: RotaryLike,
    cache_nN: torch.Tensor,
) -> None:
    """The window's rows into the cache (any float dtype)."""
    rank = len(norm_c)
    rope = rotary(row_TN[:, rank:].unsqueeze(1), _positions(start, row_TN), spec).squeeze(1)
    made = torch.cat([rms_norm(row_TN[:, :rank], norm_c, eps), rope], dim=1)
    cache_nN[start : start + len(row_TN)].copy_(made)


def absorbed(
    q_THd: torch.Tensor, k_b_Hpc: torch.Tensor, start: int, spec: RotaryLike
) -> torch.Tensor:
    """Queries against the cache's rows, in q's dtype."""
    n_plain = k_b_Hpc.shape[1]
    rope = rotary(q_THd[..., n_plain:], _positions(start, q_THd), spec)
    latent = [torch.bmm(q[:, None, :n_plain].clone(), k_b_Hpc).squeeze(1) for q in q_THd]
    return torch.cat([torch.stack(latent), rope], dim=2)


def expanded(mixed_THc: torch.Tensor, v_b_Hvc: torch.Tensor) -> torch.Tensor:
    """Values of the mixed latents."""
    values = [torch.bmm(v_b_Hvc, mixed.clone().unsqueeze(-1)).squeeze(-1) for mixed in mixed_THc]
    return torch.stack(values)
