"""The greedy choice on the device against kernels/sample, and counts of logits that are not finite
against torch."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.sample import argmax as argmax_ref
from strata.kernels.sample.triton import PIECE, Scratch, choose, n_pieces
from tests.kernels.test_sample import CASES

V = 2 * PIECE + 77
"""Two pieces and a bit."""


def scratch(n_tokens: int, n_vocab: int, device: torch.device) -> Scratch:
    shape = (n_tokens, n_pieces(n_vocab))
    return Scratch(
        torch.zeros(shape, dtype=torch.int64, device=device),
        torch.zeros(shape, dtype=torch.int32, device=device),
        torch.zeros(n_tokens, dtype=torch.int32, device=device),
    )


def chosen(
    logits: torch.Tensor, device: torch.device, made: Scratch | None = None
) -> tuple[list[int], list[int]]:
    """(ids, counts) of one launch."""
    found = torch.full((len(logits), 2), -1, dtype=torch.int32, device=device)
    choose(logits.to(device), made or scratch(*logits.shape, device), found)
    return found[:, 0].tolist(), found[:, 1].tolist()


def expected(logits: torch.Tensor) -> tuple[list[int], list[int]]:
    return argmax_ref(logits).tolist(), (~torch.isfinite(logits)).sum(-1).tolist()


def normal(n_tokens: int, n_vocab: int = V) -> torch.Tensor:
    return torch.randn(n_tokens, n_vocab, generator=torch.Generator().manual_seed(n_tokens))


def test_small_cases(triton_device: torch.device) -> None:
    logits = torch.tensor([row for row, _ in CASES])
    ids, counts = chosen(logits, triton_device)
    assert ids == [best for _, best in CASES]
    assert counts == [0, 0, 2, 4, 4, 4, 3]  # by hand


def test_ties_across_pieces(triton_device: torch.device) -> None:
    """Equal best logits in several pieces, zeros of both signs, and the best at the very end."""
    logits = normal(3)
    logits[0, [PIECE - 1, PIECE, 2 * PIECE + 5]] = 9.0
    logits[1, -1] = 9.0
    logits[2] = -logits[2].abs() - 0.1
    logits[2, [PIECE + 3, 2 * PIECE]] = torch.tensor([-0.0, 0.0])
    assert chosen(logits, triton_device) == ([PIECE - 1, V - 1, PIECE + 3], [0, 0, 0])


@pytest.mark.parametrize("n_tokens", [1, 5, 8])
@pytest.mark.parametrize("n_vocab", [1, PIECE, V])
def test_windows_one_after_the_other(
    n_tokens: int, n_vocab: int, triton_device: torch.device
) -> None:
    """The counters are 0 again after each window, also after one with NaN in some of its rows."""
    made = scratch(n_tokens, n_vocab, triton_device)
    for seed in range(3):
        logits = normal(n_tokens + 8 * seed, n_vocab)[-n_tokens:].contiguous()
        if seed == 1:
            logits[n_tokens // 2, n_vocab // 2] = float("nan")
            logits[-1, -1] = float("inf")
        assert chosen(logits, triton_device, made) == expected(logits)
        assert not made.done.any()


def test_a_row_does_not_depend_on_the_others(triton_device: torch.device) -> None:
    logits = normal(8)
    alone = [chosen(logits[t : t + 1].contiguous(), triton_device)[0][0] for t in range(8)]
    assert chosen(logits, triton_device)[0] == alone
