"""The n-gram block on the device against the torch ops that models/ngram is made of."""

from __future__ import annotations

import torch

from strata.kernels.gdn import causal_conv
from strata.kernels.ngram import gate
from strata.kernels.ngram.triton import NgramWeights, ngram
from strata.kernels.rms_norm import rms_norm

C, D, P, DILATION, ENTRIES = 2, 24, 4, 3, 13
N = C * D
EPS = 1e-6


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(device: torch.device) -> NgramWeights:
    tensors = [rand(s, N).to(device) for s in (1, 2, 3)]
    return NgramWeights(*tensors, rand(4, P, N).to(device), DILATION, EPS)


def reference(key: torch.Tensor, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The residual after the block for a whole sequence from position 0."""
    w, n = weights(torch.device("cpu")), len(key)
    shape = (n, C, D)
    normed_key = rms_norm(key, w.norm_key, EPS, C).view(shape)
    query = rms_norm(residual.flatten(1), w.norm_query, EPS, C).view(shape)
    u = (gate(normed_key, query).unsqueeze(-1) * value.unsqueeze(1)).flatten(1)
    column = rms_norm(u, w.norm_conv, EPS, C)
    y = causal_conv(torch.zeros(DILATION * (P - 1), N), column, w.taps_PN, DILATION)
    return residual + (u + y).view(shape)


def run(sizes: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Windows (tokens, of which kept); the residual of all kept tokens."""
    total = sum(kept for _, kept in sizes) + 4
    key, value, residual = rand(5, total, N), rand(6, total, D), rand(7, total, C, D)
    key[2] = 0.0  # a score of exactly 0
    w, ring = weights(device), torch.full((ENTRIES, N), float("nan"), device=device)
    at, outs = 0, []
    for size, kept in sizes:
        rows = slice(at, at + size)
        out = residual[rows].clone().to(device)
        pos = torch.arange(at, at + size, dtype=torch.int32, device=device)
        scratch = torch.full((2, size, N), float("nan"), device=device)
        ngram(key[rows].to(device), value[rows].to(device), out, ring, pos, w, scratch)
        outs.append(out[:kept].cpu())
        at += kept
    expected = reference(key[:at], value[:at], residual[:at])
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-5, atol=1e-5)
    return torch.cat(outs)


def test_windows_with_rejected_tokens(triton_device: torch.device) -> None:
    """14 kept tokens; the ring of 13 columns wraps."""
    run([(4, 2), (1, 1), (4, 4), (3, 1), (4, 4), (2, 2)], triton_device)


def test_any_split_has_the_same_bits(triton_device: torch.device) -> None:
    whole = run([(4, 4)], triton_device)
    assert torch.equal(run([(1, 1)] * 4, triton_device), whole)
