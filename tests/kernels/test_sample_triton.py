"""The greedy choice on the device against kernels/sample."""

from __future__ import annotations

import torch

from strata.kernels.sample import argmax as argmax_ref
from strata.kernels.sample.triton import PIECE, argmax, new_scratch
from tests.kernels.test_sample import CASES


def choose(logits: torch.Tensor, device: torch.device) -> torch.Tensor:
    ids = torch.full((len(logits),), -1, dtype=torch.int32, device=device)
    argmax(logits.to(device), new_scratch(*logits.shape, device), ids)
    return ids.cpu()


def test_small_cases(triton_device: torch.device) -> None:
    logits = torch.tensor([row for row, _ in CASES])
    assert torch.equal(choose(logits, triton_device), argmax_ref(logits))


def test_ties_across_pieces(triton_device: torch.device) -> None:
    """Two and a half pieces; equal best logits in several of them, and at the very end."""
    logits = torch.randn(3, 2 * PIECE + 77, generator=torch.Generator().manual_seed(0))
    logits[0, [PIECE - 1, PIECE, 2 * PIECE + 5]] = 9.0
    logits[1, -1] = 9.0
    ids = choose(logits, triton_device)
    assert ids[:2].tolist() == [PIECE - 1, 2 * PIECE + 76]
    assert torch.equal(ids, argmax_ref(logits))
